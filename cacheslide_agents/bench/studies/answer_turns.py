"""Every question of the data folder that has a short answer, each as a changed turn.

In: `hotpotqa/dev.jsonl` with the reflections of `reflexion_dev.jsonl`, and `msc/dev.jsonl`. Out:
drafts by task in an order that `seed` decides, so that the first of them are a random sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from random import Random

from cacheslide_agents.bench.datasets import (
    Dialogue,
    HotpotQuestion,
    dialogues,
)
from cacheslide_agents.bench.workloads.base import Draft, Limits, Turn
from cacheslide_agents.bench.workloads.memgpt import exchanges, moments, shown_sessions
from cacheslide_agents.bench.workloads.reflexion import Corpus, reflexion_prompt
from cacheslide_agents.errors import DataError

ANSWER_TOKENS = 24
"""Of an answer, at most."""
REFLECTION = (
    "My answer was not what the question asks for. This time I will find the passage about each "
    "name in the question, follow how they are related, and give exactly what is asked for."
)
"""Of our own wording, for questions whose recorded runs hold no reflection."""


def answer_drafts(data: Path, limits: Limits, seed: int) -> dict[str, list[Draft]]:
    """One draft per question: `reflexion` for HotpotQA, `memgpt` for MSC.

    Questions of one dialogue stay together, because their prompts differ in the end only.
    """
    talks = dialogues(data / "msc" / "dev.jsonl")
    groups = {
        "reflexion": [[each] for each in _reflexion(data, limits)],
        "memgpt": [list(_memgpt(each, limits)) for each in talks],
    }
    for drafts in groups.values():
        Random(seed).shuffle(drafts)
    return {task: list(chain.from_iterable(drafts)) for task, drafts in groups.items()}


def built(drafts: Sequence[Draft], limit: int | None) -> list[Turn]:
    """The first `limit` of them (default: all) that fit, as turns."""
    return list(islice((turn for each in drafts if (turn := each.build()) is not None), limit))


def check_any(turns: Sequence[Turn], data: Path, max_prompt_tokens: int) -> None:
    """`DataError` where no question fits."""
    if not turns:
        raise DataError(
            f"no question in {data} fits {max_prompt_tokens} tokens; raise --max-prompt-tokens"
        )


def interleaved(turns: Mapping[str, Sequence[Turn]]) -> list[Turn]:
    """Those of every task spread evenly, each task's in their order: all tasks end together."""
    placed = [
        ((number + 0.5) / len(some), turn)
        for some in turns.values()
        for number, turn in enumerate(some)
    ]
    return [turn for _, turn in sorted(placed, key=itemgetter(0))]


def _reflexion(data: Path, limits: Limits) -> Iterator[Draft]:
    """The first attempt at a question, then the one with its first reflections."""
    corpus = Corpus.read(data)
    recorded = corpus.first_reflections()
    for question in corpus.questions:
        known = recorded.get(question.id, (REFLECTION,))
        build = partial(_attempts, question, known, corpus.examples_for(question), limits)
        yield Draft(question.id, 2, "reflexion", build)


def _attempts(
    question: HotpotQuestion,
    reflections: Sequence[str],
    examples: Sequence[HotpotQuestion],
    limits: Limits,
) -> Turn | None:
    old, new = (reflexion_prompt(question, known, examples) for known in ((), reflections))
    if not (limits.fits(old) and limits.fits(new)):
        return None
    return Turn(question.id, 2, "reflexion", old, new, (question.answer,))


def _memgpt(dialogue: Dialogue, limits: Limits) -> Iterator[Draft]:
    for number in range(len(dialogue.questions)):
        name, turn = f"{dialogue.id}:{number + 1}", exchanges(dialogue)
        yield Draft(name, turn, "memgpt", partial(_asked, dialogue, number, limits))


def _asked(dialogue: Dialogue, number: int, limits: Limits) -> Turn | None:
    """As in the workload, but a short dialogue is shown whole instead of being left out."""
    question, answer = dialogue.questions[number]
    before, now = moments(dialogue, question)
    sessions = shown_sessions(now, limits) or len(dialogue.sessions)
    old, new = before.prompt(sessions), now.prompt(sessions)
    if not (limits.fits(old) and limits.fits(new)):
        return None
    return Turn(f"{dialogue.id}:{number + 1}", exchanges(dialogue), "memgpt", old, new, (answer,))
