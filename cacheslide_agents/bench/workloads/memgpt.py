"""MemGPT: a question to a companion whose memory block has just learned one more fact.

In: `msc/dev.jsonl`. Out: one draft per question. System text and function descriptions | memory
block | function schemas | dialogue of the last sessions | question. From t-1 to t one fact is
added, the counters and the time stamp change, and the last exchange is appended.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cacheslide_agents.bench.datasets import Dialogue, Utterance, dialogues
from cacheslide_agents.bench.workloads.base import Draft, Limits, Turn, template
from cacheslide_agents.bench.workloads.functions import FUNCTIONS
from cacheslide_agents.chunks import ChunkedPrompt

MIN_TOKENS = 1300
LAST_SESSIONS = 2
"""Sessions shown; earlier ones are added, newest first, while the prompt is under `MIN_TOKENS`."""
_START = datetime(2024, 3, 4, 9, 30)
_PER_UTTERANCE = timedelta(minutes=3)


@dataclass(frozen=True, slots=True)
class Moment:
    """A dialogue as it stood: what was said, and how many of the facts were already written."""

    dialogue: Dialogue
    said: tuple[Utterance, ...]
    facts: tuple[str, ...]
    question: str

    def prompt(self, sessions: int) -> ChunkedPrompt:
        """The prompt that shows the last `sessions` sessions."""
        hidden = sum(map(len, self.dialogue.sessions[: len(self.dialogue.sessions) - sessions]))
        return template("memgpt").render(
            timestamp=(_START + len(self.said) * _PER_UTTERANCE).strftime("%Y-%m-%d %H:%M"),
            counters={
                "messages in recall memory": len(self.said),
                "facts in core memory": len(self.facts),
                "passages in archival memory": len(self.said) // 4,
            },
            facts=list(self.facts),
            functions=FUNCTIONS,
            dialogue=[{"speaker": one.speaker, "text": one.text} for one in self.said[hidden:]],
            question=self.question,
        )


def drafts(folder: Path, limits: Limits) -> list[Draft]:
    """One draft per question, in file order."""
    return [
        _draft(dialogue, number, limits)
        for dialogue in dialogues(folder / "msc" / "dev.jsonl")
        for number in range(len(dialogue.questions))
    ]


def exchanges(dialogue: Dialogue) -> int:
    return sum(map(len, dialogue.sessions)) // 2


def moments(dialogue: Dialogue, question: str) -> tuple[Moment, Moment]:
    """Turns t-1 and t. A fact is written one exchange after it was told."""
    said = tuple(turn for session in dialogue.sessions for turn in session)
    told = (
        *(
            f"Speaker {number}: {fact}"
            for number, facts in enumerate(dialogue.memory, start=1)
            for fact in facts
        ),
        *(f"{turn.speaker}: {turn.fact}" for turn in said[:-2] if turn.fact),
    )
    before = Moment(dialogue, said[:-2], told[:-1], question)
    return before, Moment(dialogue, said, told, question)


def shown_sessions(now: Moment, limits: Limits) -> int | None:
    """How many of the last sessions make a prompt of at least `MIN_TOKENS`, if any number does."""
    every = len(now.dialogue.sessions)
    for sessions in range(min(LAST_SESSIONS, every), every + 1):
        prompt = now.prompt(sessions)
        if limits.prompt(prompt) >= MIN_TOKENS:
            return sessions if limits.fits(prompt) else None
    return None


def _draft(dialogue: Dialogue, number: int, limits: Limits) -> Draft:
    name = f"{dialogue.id}:{number + 1}"
    turn = exchanges(dialogue)

    def build() -> Turn | None:
        question, answer = dialogue.questions[number]
        before, now = moments(dialogue, question)
        sessions = shown_sessions(now, limits) if now.facts else None
        if sessions is None:
            return None
        pair = (before.prompt(sessions), now.prompt(sessions))
        return Turn(name, turn, "memgpt", *pair, answers=(answer,))

    return Draft(name, turn, "memgpt", build)
