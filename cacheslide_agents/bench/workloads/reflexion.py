"""Reflexion: the same question again, with one more reflection on a failed attempt.

In: `hotpotqa/reflexion_dev.jsonl` joined with `hotpotqa/dev.jsonl`. Out: one draft per pair of
trials whose reflections differ. Instruction and eight worked examples | reflections | passages and
question | cue; from t-1 to t only the reflections change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cacheslide_agents.bench.datasets import (
    HotpotQuestion,
    ReflexionRun,
    Trial,
    hotpot_questions,
    reflexion_runs,
)
from cacheslide_agents.bench.workloads.base import Draft, Limits, Turn, template
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.errors import DataError

EXAMPLES = 8


def drafts(folder: Path, limits: Limits) -> list[Draft]:
    """One draft per changed trial, in file order."""
    corpus = Corpus.read(folder)
    return [
        _draft(corpus, run, before, now, limits)
        for run in corpus.runs
        for before, now in pairwise(run.trials)
        if before.reflections != now.reflections
    ]


class Corpus:
    """Runs, their questions, and as worked examples the first questions that no run asks."""

    def __init__(self, runs: Sequence[ReflexionRun], questions: Sequence[HotpotQuestion]) -> None:
        self.runs, self.questions = tuple(runs), tuple(questions)
        self._by_id = {one.id: one for one in questions}
        asked = {run.hotpotqa_id for run in runs}
        if missing := sorted(asked - self._by_id.keys()):
            raise DataError(
                f"hotpotqa/dev.jsonl lacks question {missing[0]!r} of reflexion_dev.jsonl"
            )
        self.examples = tuple(one for one in questions if one.id not in asked)[:EXAMPLES]

    @classmethod
    def read(cls, folder: Path) -> Corpus:
        return cls(
            reflexion_runs(folder / "hotpotqa" / "reflexion_dev.jsonl"),
            hotpot_questions(folder / "hotpotqa" / "dev.jsonl"),
        )

    def question(self, run: ReflexionRun) -> HotpotQuestion:
        return self._by_id[run.hotpotqa_id]

    def examples_for(self, question: HotpotQuestion) -> list[HotpotQuestion]:
        """A question that is a worked example itself goes without it: it gives the answer away."""
        return [one for one in self.examples if one.id != question.id]

    def first_reflections(self) -> dict[str, tuple[str, ...]]:
        """By question, those of the first trial that had any."""
        found: dict[str, tuple[str, ...]] = {}
        for run in self.runs:
            for trial in run.trials:
                if trial.reflections:
                    found.setdefault(run.hotpotqa_id, trial.reflections)
        return found


def reflexion_prompt(
    question: HotpotQuestion, reflections: Sequence[str], examples: Sequence[HotpotQuestion]
) -> ChunkedPrompt:
    """The prompt of one trial that knows `reflections`, oldest first."""
    return template("reflexion").render(
        examples=[{"question": one.question, "answer": one.answer} for one in examples],
        reflections=list(reflections),
        paragraphs=[{"title": one.title, "text": one.text} for one in question.paragraphs],
        question=question.question,
    )


def _draft(corpus: Corpus, run: ReflexionRun, before: Trial, now: Trial, limits: Limits) -> Draft:
    def build() -> Turn | None:
        question = corpus.question(run)
        old, new = (
            reflexion_prompt(question, trial.reflections, corpus.examples)
            for trial in (before, now)
        )
        if not (limits.fits(old) and limits.fits(new)):
            return None
        return Turn(run.id, now.trial, "reflexion", old, new, (question.answer,))

    return Draft(run.id, now.trial, "reflexion", build)
