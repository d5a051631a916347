"""A small Reflexion episode that needs no data folder: three trials of one HotpotQA question.

In: one of the questions shipped with the package (CC BY-SA 4.0, see `data/NOTICE`). Out: the
prompts of trials 1 to 3, which differ in their reflections only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files

from cacheslide_agents.bench.datasets import HotpotQuestion, hotpot_questions
from cacheslide_agents.bench.workloads.reflexion import reflexion_prompt
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message
from cacheslide_agents.errors import DataError

REFLECTIONS = (
    "I answered from the first passage that shares a name with the question. Next time I will "
    "find every passage the question needs and write down how they are linked before I answer.",
    "I found the right passage but answered with the link between the two facts and not with what "
    "was asked. Next time I will read the question's last words again and answer exactly those.",
)
"""What a failed attempt teaches, in words that fit any of the questions."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One question, and others as worked examples."""

    question: HotpotQuestion
    examples: tuple[HotpotQuestion, ...]

    def prompt(self, reflections: Sequence[str]) -> ChunkedPrompt:
        """The prompt of a trial that knows `reflections`."""
        return reflexion_prompt(self.question, reflections, self.examples)

    def prompts(self) -> list[ChunkedPrompt]:
        """Trials 1 to 3, which know none, one and two of `REFLECTIONS`."""
        return [self.prompt(REFLECTIONS[:known]) for known in range(len(REFLECTIONS) + 1)]

    def reflect(self, reflections: Sequence[str], answer: str) -> ChunkedPrompt:
        """Asks the model itself for the next reflection, after `answer` turned out wrong."""
        prompt = self.prompt(reflections)
        request = (
            "That answer is wrong. In two sentences, say what went wrong and what you will do "
            "differently next time."
        )
        messages = (
            Message("assistant", (Chunk("attempt", answer),)),
            Message("user", (Chunk("reflect", request),)),
        )
        return ChunkedPrompt((*prompt.messages, *messages), prompt.task)


def sample_questions() -> list[HotpotQuestion]:
    """The questions shipped with the package."""
    with as_file(files("cacheslide_agents.bench") / "data" / "hotpotqa_sample.jsonl") as path:
        return hotpot_questions(path)


def demo_episode(number: int = 0) -> Episode:
    """The episode of sample question `number`, counted from 0."""
    questions = sample_questions()
    if not 0 <= number < len(questions):
        raise DataError(f"there is no sample question {number}; choose 0 to {len(questions) - 1}")
    others = tuple(one for i, one in enumerate(questions) if i != number)
    return Episode(questions[number], others)
