"""Converted: does a model answer as well after its positions were made contextual (CoPE)?

In: every HotpotQA question as a `reflexion` turn; a model, and the same one converted. Out: `rows`,
the scores of both models' dense answers, and `points`, of all questions and of those that
`cacheslide record` holds out: mean F1 and EM, the mean paired difference with its bootstrap 95 %
interval, and the share of answers whose text changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cacheslide_agents.answered import answered
from cacheslide_agents.backend import Backend, GenerationRequest, Sampling
from cacheslide_agents.bench.asked import trained_on
from cacheslide_agents.bench.metrics import first_line
from cacheslide_agents.bench.runner import Progress, silent, token_limits
from cacheslide_agents.bench.studies.answer_turns import (
    ANSWER_TOKENS,
    answer_drafts,
    built,
    check_any,
)
from cacheslide_agents.bench.studies.kept_keys import converted
from cacheslide_agents.bench.studies.scored import known_rows, paired, scored
from cacheslide_agents.bench.workloads.base import Turn
from cacheslide_agents.bench.workloads.reflexion import Corpus
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.policies import Recompute
from cacheslide_agents.prompt.chat import ChatEncoder

TASK = "reflexion"
BASE, CONVERTED = WAYS = ("base", "converted")
Found = dict[str, Any]


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    cope_model: str = "smollm2-135m-cope",
    earlier: Mapping[str, Any] | None = None,
    limit: int | None = None,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> Found:
    """Ask `limit` questions (default: all) of both models. Rows of an `earlier` run are kept."""
    encode = ChatEncoder(backend.tokenizer).encode
    drafts = answer_drafts(data, token_limits(backend, encode, max_prompt_tokens), seed)[TASK]
    learnt = {one.id for one in trained_on(Corpus.read(data).questions)}
    turns = built(sorted(drafts, key=lambda draft: draft.id in learnt), limit)
    check_any(turns, data, max_prompt_tokens)
    with converted(backend, cope_model) as other:
        about = {
            "model": backend.model_id,
            "cope_model": other.model_id,
            "answer_tokens": ANSWER_TOKENS,
            "max_prompt_tokens": max_prompt_tokens,
        }
        known = known_rows(earlier, about, partial(paired, ways=WAYS))
        rows = {turn.id: known.get((TASK, turn.id)) for turn in turns}
        for number, turn in enumerate(turns):
            if rows[turn.id] is None:
                prompt = encode(turn.measure)
                answers = {BASE: _answer(backend, prompt), CONVERTED: _answer(other, prompt)}
                rows[turn.id] = _row(turn, len(prompt.ids), turn.id not in learnt, answers)
                save(_study(about, len(drafts), rows.values()))
            progress(number + 1, len(turns), turn.id)
    return _study(about, len(drafts), rows.values())


def _answer(backend: Backend, prompt: EncodedPrompt) -> str:
    sampling = Sampling(max_tokens=ANSWER_TOKENS)
    request = GenerationRequest.of(prompt, sampling=sampling, policy=Recompute(), retain=False)
    return first_line(answered(backend, request).text)


def _row(turn: Turn, tokens: int, held_out: bool, answers: Mapping[str, str]) -> Found:
    about = {"task": turn.task, "id": turn.id, "prompt_tokens": tokens, "held_out": held_out}
    return {**about, **scored(answers, turn.answers), **answers}


def _study(about: Found, questions: int, rows: Iterable[Found | None]) -> Found:
    """`rows` in the order of the run; `None` where a question was not asked yet."""
    asked = [row for row in rows if row is not None]
    parts = {"held out": [row for row in asked if row["held_out"]], "all": asked}
    points = [
        {"task": TASK, "part": name, "questions": questions, "n": len(part), **paired(part, WAYS)}
        for name, part in parts.items()
        if part
    ]
    return {**about, "points": points, "rows": asked}
