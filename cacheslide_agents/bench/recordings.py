"""Recorded agent runs, as answers that can be replayed.

In: records of the data folder, or what ships with the package. Out: for each agent, what an episode
begins with, the answers a stronger model (or a person) gave, and what came back in between. An
answer of `None` is left to the model that replays it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cacheslide_agents.bench.datasets import (
    Dialogue,
    HotpotQuestion,
    ReflexionRun,
    Trajectory,
    Trial,
    Utterance,
)
from cacheslide_agents.bench.workloads.swe_agent import action_text

_PART = re.compile(r"^(Thought|Action):\s*", re.MULTILINE)
_OBSERVATION = re.compile(r"^Observation.*", re.MULTILINE | re.DOTALL)
USER, COMPANION = "Speaker 1", "Speaker 2"
OPEN_ANSWERS = 4
"""A companion may call this many functions before it has to reply to the last question."""


@dataclass(frozen=True, slots=True)
class ReflexionRecording:
    """For each trial a thought and an answer, and a reflection between trials."""

    id: str
    question: HotpotQuestion
    trials: int
    answers: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class DialogueRecording:
    """What the companion knows, what it has seen, what is said now, and its answers to that.

    `seen` are (user, companion) exchanges. The last message is a question that `gold` answers.
    """

    id: str
    human: str
    archive: tuple[str, ...]
    seen: tuple[tuple[str, str], ...]
    says: tuple[str, ...]
    answers: tuple[str | None, ...]
    gold: str


@dataclass(frozen=True, slots=True)
class CommandRecording:
    """One answer and one observation for each step."""

    id: str
    system: str
    issue: str
    answers: tuple[str, ...]
    observations: tuple[str, ...]


def reflexion_recording(run: ReflexionRun, question: HotpotQuestion) -> ReflexionRecording | None:
    """`None` for a run in rounds (ReAct), and for one that has a single trial."""
    if len(run.trials) < 2 or not run.trials[0].trajectory.startswith("Thought:"):
        return None
    answers: list[str | None] = []
    for before, after in pairwise(run.trials):
        lessons = after.reflections[len(before.reflections) :]
        answers += [*_thought_and_answer(before), " ".join(lessons) or after.reflections[-1]]
    answers += [_thought_and_answer(run.trials[-1])[0], None]
    return ReflexionRecording(run.id, question, len(run.trials), tuple(answers))


def demo_recording(
    question: HotpotQuestion, reflections: Sequence[str], answers: Sequence[str]
) -> ReflexionRecording:
    """Wrong `answers` with their `reflections`, then a last trial that is left to the model."""
    recorded: list[str | None] = []
    for answer, reflection in zip(answers, reflections, strict=True):
        recorded += [f"The passages lead to {answer}.", answer, reflection]
    return ReflexionRecording(question.id, question, len(answers) + 1, (*recorded, None, None))


def dialogue_recording(dialogue: Dialogue, exchanges: int) -> DialogueRecording | None:
    """The last `exchanges` exchanges of the last session, then the first question.

    Earlier sessions are out of view; their facts are in memory. `None` for a dialogue without
    sessions before the last one, or whose last session is too short.
    """
    *earlier, last = dialogue.sessions
    pairs = list(_exchanges(last))
    if not earlier or len(pairs) < exchanges or not dialogue.questions:
        return None
    seen, now = pairs[: len(pairs) - exchanges], pairs[len(pairs) - exchanges :]
    question, gold = dialogue.questions[0]
    before = [turn for session in earlier for turn in session]
    known = [f"Speaker {n}: {fact}" for n, facts in enumerate(dialogue.memory, 1) for fact in facts]
    known += [_fact(turn) for turn in (*before, *(t for pair in seen for t in pair)) if turn.fact]
    return DialogueRecording(
        id=dialogue.id,
        human="\n".join(known),
        archive=tuple(f"{turn.speaker}: {turn.text}" for turn in before),
        seen=tuple((asked.text, said.text) for asked, said in seen),
        says=(*(asked.text for asked, _ in now), question),
        answers=(*(text for pair in now for text in _kept(*pair)), *([None] * OPEN_ANSWERS)),
        gold=gold,
    )


def command_recording(
    trajectory: Trajectory, steps: int, characters: int
) -> CommandRecording | None:
    """The first `steps` commands; observations are cut to `characters`, and so is the head.

    `None` for a trajectory with fewer steps.
    """
    said = trajectory.messages[2:]
    pairs = list(zip(said[::2], said[1::2], strict=False))[:steps]
    if len(pairs) < steps:
        return None
    return CommandRecording(
        id=trajectory.id,
        system=cut(trajectory.messages[0].content, characters),
        issue=cut(trajectory.issue, characters),
        answers=tuple(cut(action_text(action), characters) for action, _ in pairs),
        observations=tuple(cut(seen.content, characters) for _, seen in pairs),
    )


def cut(text: str, characters: int) -> str:
    """`text` without its middle, where it is longer than `characters`."""
    half = characters // 2
    gap = len(text) - 2 * half
    if gap <= 0:
        return text
    return f"{text[:half]}\n[... {gap} characters left out ...]\n{text[-half:]}"


def function_call(name: str, **arguments: str) -> str:
    """A call as the companion writes it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _thought_and_answer(trial: Trial) -> tuple[str, str]:
    parts = _PART.split(_OBSERVATION.sub("", trial.trajectory))
    named = dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))
    return named.get("Thought", ""), named.get("Action", "")


def _exchanges(session: Sequence[Utterance]) -> Iterator[tuple[Utterance, Utterance]]:
    for asked, said in pairwise(session):
        if (asked.speaker, said.speaker) == (USER, COMPANION):
            yield asked, said


def _kept(asked: Utterance, said: Utterance) -> Iterator[str]:
    """What a companion with a good memory does with one message of the user."""
    for turn in (asked, said):
        if turn.fact:
            yield function_call("core_memory_append", block="human", content=_fact(turn))
    yield function_call("send_message", message=said.text)


def _fact(turn: Utterance) -> str:
    return f"{turn.speaker}: {turn.fact}"
