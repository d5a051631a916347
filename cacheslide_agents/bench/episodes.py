"""Whole episodes of the three agents, live or replayed.

In: the data folder. Out: `Episode`s, each of which plays itself with any chat model and says how
well it ended. Needs the extra `agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cacheslide_agents.bench import recordings, small_dialogue, small_repository
from cacheslide_agents.bench.datasets import dialogues, trajectories
from cacheslide_agents.bench.metrics import token_f1
from cacheslide_agents.bench.recordings import (
    CommandRecording,
    DialogueRecording,
    ReflexionRecording,
)
from cacheslide_agents.bench.workloads.reflexion import Corpus
from langchain_cacheslide.agents import (
    Attempt,
    ChainOfThought,
    Companion,
    Question,
    Replayed,
    Shell,
    reflexion_graph,
    swe_graph,
)

LIVE, REPLAY = "live", "replay"
MODES = (LIVE, REPLAY)
TRIALS = 3
EXCHANGES = 6
"""Of a dialogue's last session; the rest of it is in view from the start."""
COMMANDS = 12
CHARACTERS = 2400
"""Longest message of a replayed SWE-agent run, about 600 tokens."""

Play = Callable[[Any, Any], float | None]


@dataclass(frozen=True, slots=True)
class Episode:
    """`play(model, config)` runs it and returns its score from 0 to 1, `None` without one."""

    agent: str
    id: str
    play: Play


def reflexion_episodes(data: Path, mode: str) -> Iterator[Episode]:
    """HotpotQA questions that a recorded agent did not get right at once. Score: F1 at the end."""
    corpus = Corpus.read(data)
    examples = [{"question": one.question, "answer": one.answer} for one in corpus.examples]
    for run in corpus.runs:
        recording = recordings.reflexion_recording(run, corpus.question(run))
        if recording is not None:
            yield Episode("reflexion", run.id, partial(_reflexion, recording, examples, mode))


def memgpt_episodes(data: Path, mode: str) -> Iterator[Episode]:
    """The end of a long acquaintance, and a question about it. Score: F1 of the reply."""
    for dialogue in dialogues(data / "msc" / "dev.jsonl"):
        recording = recordings.dialogue_recording(dialogue, EXCHANGES)
        if recording is not None:
            yield Episode("memgpt", dialogue.id, partial(_memgpt, recording, mode))


def swe_episodes(data: Path, mode: str) -> Iterator[Episode]:
    """Live: the small repository, mended and tested. Replayed: real issues, without a score."""
    if mode == LIVE:
        yield Episode("swe_agent", "basket", _mend)
        return
    for trajectory in trajectories(data / "swe_agent" / "dev.jsonl"):
        recording = recordings.command_recording(trajectory, COMMANDS, CHARACTERS)
        if recording is not None:
            yield Episode("swe_agent", trajectory.id, partial(_commands, recording))


AGENTS: dict[str, Callable[[Path, str], Iterator[Episode]]] = {
    "reflexion": reflexion_episodes,
    "memgpt": memgpt_episodes,
    "swe_agent": swe_episodes,
}


def _reflexion(
    recording: ReflexionRecording,
    examples: list[dict[str, str]],
    mode: str,
    model: Any,
    config: Any,
) -> float:
    def f1(question: Question, attempt: Attempt, config: Any) -> float:
        return token_f1(attempt.answer, [recording.question.answer])

    live = mode == LIVE
    agent = reflexion_graph(
        ChainOfThought(model if live else Replayed(model, recording.answers), examples),
        f1,
        trials=TRIALS if live else recording.trials,
        enough=1.0 if live else inf,
    )
    question = recording.question
    passages = [{"title": one.title, "text": one.text} for one in question.paragraphs]
    done = agent.invoke({"question": question.question, "passages": passages}, config)
    return float(done["scores"][-1])


def _memgpt(recording: DialogueRecording, mode: str, model: Any, config: Any) -> float:
    companion = Companion(
        model if mode == LIVE else Replayed(model, recording.answers),
        persona=small_dialogue.PERSONA,
        human=recording.human,
        archive=recording.archive,
        seen=recording.seen,
        block_limit=len(recording.human) + CHARACTERS,
        steps=recordings.OPEN_ANSWERS,
        clock=ticking_clock(),
    )
    replies = [companion.say(said, config) for said in recording.says]
    return token_f1(replies[-1], [recording.gold])


def _mend(model: Any, config: Any) -> float:
    with TemporaryDirectory(prefix="cacheslide-") as folder:
        shell = Shell(small_repository.write_repository(Path(folder)))
        agent = swe_graph(model, shell, test=small_repository.TEST, steps=COMMANDS)
        return float(agent.invoke({"issue": small_repository.ISSUE}, config)["passed"])


def _commands(recording: CommandRecording, model: Any, config: Any) -> None:
    agent = swe_graph(
        Replayed(model, recording.answers),
        RecordedShell(recording.observations),
        steps=COMMANDS,
        system=recording.system,
        command=str,
    )
    agent.invoke({"issue": recording.issue}, config)


class RecordedShell:
    """Answers every command with what was observed then, in order."""

    def __init__(self, observations: Sequence[str]) -> None:
        self._observations = iter(observations)

    def run(self, command: str) -> str:
        return next(self._observations)


def ticking_clock() -> Callable[[], datetime]:
    """Three minutes later at every look, so that episodes can be compared word for word."""
    minutes = count(step=3)
    return lambda: datetime(2024, 3, 4, 9, 30) + timedelta(minutes=next(minutes))
