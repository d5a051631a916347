"""Whole sessions of the three agents: many turns in a row, each prompt changed from the last.

In: the data folder and token limits. Out: `Chain`s, prompts in order, built as they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from cacheslide_agents.bench.datasets import Dialogue, dialogues
from cacheslide_agents.bench.workloads import swe_agent
from cacheslide_agents.bench.workloads.base import Limits
from cacheslide_agents.bench.workloads.memgpt import Moment, moments
from cacheslide_agents.bench.workloads.reflexion import Corpus, reflexion_prompt
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.errors import DataError

_FIRST_EXCHANGES = 4
"""Exchanges of a dialogue before its first prompt."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One agent's session of one task; `prompts` fit the limits and differ from one to the next."""

    id: str
    task: str
    prompts: tuple[ChunkedPrompt, ...]


def chains(task: str, data: str | Path, limits: Limits, *, turns: int) -> Iterator[Chain]:
    """Sessions of `task`, in file order, of the first prompt and `turns` more.

    - `reflexion`: all trials of one question, then those of the next, as one agent works them off;
    - `memgpt`: a dialogue from its fourth exchange on; every turn one exchange more, the facts told
      so far, and the questions asked in rotation;
    - `swe_agent`: a trajectory from its first elided observation on.

    What is shorter is left out. `DataError` for an unknown task.
    """
    if task not in _SESSIONS:
        raise DataError(f"no agent sessions of {task!r}; known: {', '.join(_SESSIONS)}")
    for number, (name, prompts) in enumerate(_SESSIONS[task](Path(data), limits)):
        changed = tuple(islice(_changed(p for p in prompts if limits.fits(p)), turns + 1))
        if len(changed) == turns + 1:
            yield Chain(f"{name}#{number}", task, changed)


def _changed(prompts: Iterable[ChunkedPrompt]) -> Iterator[ChunkedPrompt]:
    before = None
    for prompt in prompts:
        if prompt != before:
            yield prompt
        before = prompt


Session = tuple[str, Iterator[ChunkedPrompt]]


def _reflexion(folder: Path, _: Limits) -> Iterator[Session]:
    """Every run starts a session that goes on with the runs after it, so sessions overlap late."""
    corpus = Corpus.read(folder)
    for first in range(0, len(corpus.runs), max(1, len(corpus.runs) // 16)):
        runs = corpus.runs[first:]
        yield (
            runs[0].id,
            (
                reflexion_prompt(corpus.question(run), trial.reflections, corpus.examples)
                for run in runs
                for trial in run.trials
            ),
        )


def _memgpt(folder: Path, _: Limits) -> Iterator[Session]:
    for dialogue in dialogues(folder / "msc" / "dev.jsonl"):
        if dialogue.questions:
            yield dialogue.id, (_at(dialogue, exchange) for exchange in _exchanges(dialogue))


def _exchanges(dialogue: Dialogue) -> range:
    return range(_FIRST_EXCHANGES, sum(map(len, dialogue.sessions)) // 2 + 1)


def _at(dialogue: Dialogue, exchange: int) -> ChunkedPrompt:
    """The prompt when `exchange` exchanges were said; all of them are shown."""
    left, sessions = 2 * exchange, []
    for session in dialogue.sessions:
        sessions.append(session[:left])
        left -= len(sessions[-1])
    question, _ = dialogue.questions[exchange % len(dialogue.questions)]
    _, now = moments(replace(dialogue, sessions=tuple(sessions)), question)
    return Moment.prompt(now, len(sessions))


def _swe_agent(folder: Path, limits: Limits) -> Iterator[Session]:
    for agent in swe_agent.agents(folder, limits):
        yield agent.id, _agent_prompts(agent)


def _agent_prompts(agent: swe_agent.Agent) -> Iterator[ChunkedPrompt]:
    for turn in count(swe_agent.SHOWN_OBSERVATIONS + 1):
        if turn > agent.exchanges:
            return
        prompt = agent.prompt(turn)
        if prompt is not None:
            yield prompt


_SESSIONS: dict[str, Callable[[Path, Limits], Iterator[Session]]] = {
    "reflexion": _reflexion,
    "memgpt": _memgpt,
    "swe_agent": _swe_agent,
}
