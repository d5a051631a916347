"""Questions for a model to answer, so that a conversion of it can learn from what it said.

In: `hotpotqa/dev.jsonl` with the reflections of `reflexion_dev.jsonl`. Out: `reflexion` prompts of
every second question; the others are held out, for `--study converted`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from cacheslide_agents.bench.datasets import HotpotQuestion, Paragraph
from cacheslide_agents.bench.studies.answer_turns import REFLECTION
from cacheslide_agents.bench.workloads.base import Limits
from cacheslide_agents.bench.workloads.reflexion import Corpus, reflexion_prompt
from cacheslide_agents.chunks import ChunkedPrompt

MOST_DISTRACTORS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    id: str
    prompt: ChunkedPrompt


def trained_on(questions: Sequence[HotpotQuestion]) -> Sequence[HotpotQuestion]:
    """Those that may be learnt from: of every level and type about one half."""
    return questions[1::2]


def asked(data: Path, limits: Limits, seed: int) -> Iterator[Asked]:
    """Each question twice: from all its passages, and from the gold ones among a few others.

    One of the two is a first attempt, the other knows the reflections of earlier ones.
    """
    corpus, random = Corpus.read(data), Random(seed)
    recorded = corpus.first_reflections()
    for number, question in enumerate(trained_on(corpus.questions)):
        few = _few(question, random)
        known = recorded.get(question.id, (REFLECTION,))
        examples = corpus.examples_for(question)
        for name, passages, again in (("all", question.paragraphs, 1), ("few", few, 0)):
            lessons = known if number % 2 == again else ()
            prompt = reflexion_prompt(replace(question, paragraphs=passages), lessons, examples)
            if limits.fits(prompt):
                yield Asked(f"{question.id}:{name}", prompt)


def _few(question: HotpotQuestion, random: Random) -> tuple[Paragraph, ...]:
    gold = [one for one in question.paragraphs if one.title in question.supporting_titles]
    others = [one for one in question.paragraphs if one not in gold]
    found = gold + others[: random.randint(1, MOST_DISTRACTORS)]
    random.shuffle(found)
    return tuple(found)
