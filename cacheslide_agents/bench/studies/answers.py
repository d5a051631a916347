"""Answers: are those given on reused context as good as dense ones?

In: every HotpotQA and every MSC question, as a turn of its agent. Out: `rows`, the scores of the
dense answer and of CacheSlide's, and `points`, by task: mean F1 and EM, the mean paired difference
with its bootstrap 95 % interval, and the share of answers whose text changed. Declined turns and
fallbacks count with their own answers.

The dense run takes exact heads from dense contexts, which changes nothing but rounding. These lie
in a namespace of their own, so that CacheSlide finds earlier turns only. Of MSC, which comes
without a licence of its own, scores are kept and no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import uuid4

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import Backend, GenerationRequest, Sampling
from cacheslide_agents.bench.measure import Encode
from cacheslide_agents.bench.metrics import first_line
from cacheslide_agents.bench.runner import Progress, silent, token_limits
from cacheslide_agents.bench.studies.answer_turns import (
    ANSWER_TOKENS,
    answer_drafts,
    built,
    check_any,
    interleaved,
)
from cacheslide_agents.bench.studies.scored import known_rows, paired, scored
from cacheslide_agents.bench.workloads.base import Turn
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.policies import CacheSlide, Policy, Prefix
from cacheslide_agents.prompt.chat import ChatEncoder

QUOTED = ("reflexion",)
"""Tasks whose answers may stand in the file."""
DENSE, REUSE = WAYS = ("dense", "reuse")
OUTCOMES = ("hit", "partial", "declined", "cold", "fallback")
Found = dict[str, Any]
Key = tuple[str, str]


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    earlier: Mapping[str, Any] | None = None,
    limit: int | None = None,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> dict[str, Any]:
    """Ask `limit` questions of each task (default: all) in the order of `seed`.

    Rows of an `earlier` run of the same model are kept.
    """
    asking = Asking(backend, ChatEncoder(backend.tokenizer).encode, CacheSlide())
    drafts = answer_drafts(data, token_limits(backend, asking.encode, max_prompt_tokens), seed)
    turns = interleaved({task: built(some, limit) for task, some in drafts.items()})
    check_any(turns, data, max_prompt_tokens)
    about = {
        "model": backend.model_id,
        "policy": asking.policy.name,
        "answer_tokens": ANSWER_TOKENS,
        "max_prompt_tokens": max_prompt_tokens,
    }
    questions = {task: len(some) for task, some in drafts.items()}
    known = known_rows(earlier, about, partial(_points, questions))
    rows: dict[Key, Found | None] = {_key(turn): known.get(_key(turn)) for turn in turns}
    for number, turn in enumerate(turns):
        if rows[_key(turn)] is None:
            rows[_key(turn)] = asking.both_ways(turn)
            save(_study(about, questions, rows.values()))
        progress(number + 1, len(turns), f"{turn.task}: {turn.id}")
    return _study(about, questions, rows.values())


@dataclass(frozen=True)
class Asking:
    """Asks one question both ways; `name` keeps the contexts of one run apart from others."""

    backend: Backend
    encode: Encode
    policy: Policy
    name: str = field(default_factory=lambda: f"answers-{uuid4().hex}")

    def both_ways(self, turn: Turn) -> Found:
        """One row. The turn before is stored densely, then this turn is answered twice."""
        before, prompt = self.encode(turn.populate), self.encode(turn.measure)
        self.backend.warm(self._request(turn, before, "before", Prefix(), retain=True))
        known = self._request(turn, prompt, "dense", Prefix(), retain=True)
        dense = answered(self.backend, known)
        reuse = answered(self.backend, self._request(turn, prompt, "before", self.policy))
        answers = {DENSE: first_line(dense.text), REUSE: first_line(reuse.text)}
        receipt = reuse.receipt
        return {
            "task": turn.task,
            "id": turn.id,
            "prompt_tokens": receipt.prompt_tokens,
            "reused_tokens": receipt.reused_tokens,
            "compute_fraction": receipt.compute_fraction,
            "outcome": receipt.outcome,
            "reason": receipt.reason,
            **scored(answers, turn.answers),
            **(answers if turn.task in QUOTED else {}),
        }

    def _request(
        self, turn: Turn, prompt: EncodedPrompt, kind: str, policy: Policy, *, retain: bool = False
    ) -> GenerationRequest:
        return GenerationRequest.of(
            prompt,
            namespace=f"{self.name}-{kind}",
            session=turn.id,
            sampling=Sampling(max_tokens=ANSWER_TOKENS),
            policy=policy,
            retain=retain,
        )


def _key(turn: Turn) -> Key:
    return turn.task, turn.id


def _study(
    about: Found, questions: Mapping[str, int], rows: Iterable[Found | None]
) -> dict[str, Any]:
    """`rows` in the order of the run; `None` where a question was not asked yet."""
    asked = [row for row in rows if row is not None]
    return {**about, "points": _points(questions, asked), "rows": asked}


def _points(questions: Mapping[str, int], rows: Sequence[Found]) -> list[dict[str, Any]]:
    """One for each task that has rows; `questions` is how many the data holds."""
    found = []
    for task, asked in questions.items():
        here = [row for row in rows if row["task"] == task]
        if here:
            outcomes = Counter(row["outcome"] for row in here)
            found.append(
                {
                    "task": task,
                    "questions": asked,
                    "n": len(here),
                    **paired(here, WAYS),
                    "compute_fraction": fmean(row["compute_fraction"] for row in here),
                    **{outcome: outcomes[outcome] for outcome in OUTCOMES},
                }
            )
    return found
