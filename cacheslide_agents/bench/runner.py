"""Runs one workload: populate, measure, write, row by row.

In: a backend, a task, the data folder, policy names. Out: `Results`, kept on disk after each row.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cacheslide_agents.backend import Backend
from cacheslide_agents.bench.measure import REFERENCE, Bench, Encode, Policies
from cacheslide_agents.bench.results import Results, Row, read_results, write_json
from cacheslide_agents.bench.summary import summarise
from cacheslide_agents.bench.workloads import Limits, Turn, load_turns
from cacheslide_agents.chunks import Role
from cacheslide_agents.errors import DataError
from cacheslide_agents.policies import POLICY_NAMES, PromptCache, named
from cacheslide_agents.policies.base import Policy
from cacheslide_agents.prompt.chat import ChatEncoder

ANSWER_TOKENS = 32
Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, label: str) -> None:
    """The default progress hook."""


def run_task(
    task: str,
    *,
    data: str | Path,
    backend: Backend,
    policies: Sequence[str] = POLICY_NAMES,
    limit: int | None = None,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    repeats: int = 1,
    answers: bool = True,
    out: str | Path | None = None,
    resume: bool = False,
    backend_name: str = "torch",
    progress: Progress = silent,
) -> Results:
    """Measure `policies`, and always `recompute`, on `limit` turns of `task` chosen by `seed`.

    With `resume`, complete turns in `out` are kept. Raises `DataError` for missing or malformed
    data; an error that the backend does not answer itself ends the run and leaves `out` as it was.
    """
    encode: Encode = ChatEncoder(backend.tokenizer).encode
    bench = Bench(backend, encode, repeats, ANSWER_TOKENS if answers else 0)
    limits = token_limits(backend, encode, max_prompt_tokens)
    chosen: dict[str, Policy] = {
        name: named(name) for name in dict.fromkeys((REFERENCE, *policies))
    }
    slotted = "prompt_cache" in chosen
    turns = load_turns(task, data, limits, limit=None if slotted else limit, seed=seed)
    if slotted:
        chosen["prompt_cache"] = PromptCache(slots=longest_updates(turns, encode))
    turns = turns[:limit]
    results = _start(task, backend, backend_name)
    if resume and out is not None and Path(out).exists():
        results = _with_rows(results, _kept(results, read_results(out), turns, chosen))
    done = {(row.id, row.turn) for row in results.rows}
    for number, turn in enumerate(turns):
        if (turn.id, turn.turn) not in done:
            populated = bench.populate(turn, chosen)
            if number == 0:
                bench.warm_up(populated, chosen)
            rows = bench.measure(populated, chosen, rotate=number)
            results = _with_rows(results, (*results.rows, *rows))
            if out is not None:
                write_json(out, results.to_dict())
        progress(number + 1, len(turns), f"{turn.id}, turn {turn.turn}")
    return results


def token_limits(backend: Backend, encode: Encode, max_prompt_tokens: int) -> Limits:
    """Limits in the backend's own tokens, with room for an answer in its window."""
    return window_limits(backend.tokenizer, backend.max_model_len, encode, max_prompt_tokens)


def window_limits(tokenizer: Any, window: int, encode: Encode, max_prompt_tokens: int) -> Limits:
    """The same for a tokenizer and the `window` of its model, where no backend is loaded."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    most = min(max_prompt_tokens, window - ANSWER_TOKENS)
    return Limits(count, lambda prompt: len(encode(prompt).ids), most)


def longest_updates(turns: Iterable[Turn], encode: Encode) -> dict[str, int]:
    """Tokens of the longest value of every update chunk, by chunk id: PromptCache's slots."""
    longest: dict[str, int] = defaultdict(int)
    for turn in turns:
        for prompt in (turn.populate, turn.measure):
            for span in encode(prompt).spans:
                if span.role is Role.RECOMPUTE:
                    longest[span.id] = max(longest[span.id], len(span))
    return dict(longest)


def _start(task: str, backend: Backend, backend_name: str) -> Results:
    return Results(
        task=task,
        model=backend.model_id,
        backend=backend_name,
        device=str(getattr(backend, "device", "cpu")),
        threads=torch.get_num_threads(),
        versions=_versions(),
        rows=(),
        summary={},
    )


def _with_rows(results: Results, rows: Sequence[Row]) -> Results:
    return replace(results, rows=tuple(rows), summary=summarise(rows))


def _kept(
    results: Results, earlier: Results, turns: Sequence[Turn], policies: Policies
) -> list[Row]:
    """Rows of an earlier run of the same kind, of those turns that have every policy."""
    for name in ("task", "model", "backend"):
        mine, theirs = getattr(results, name), getattr(earlier, name)
        if mine != theirs:
            raise DataError(f"cannot resume: the file's {name} is {theirs!r}, not {mine!r}")
    wanted = {(turn.id, turn.turn) for turn in turns}
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in earlier.rows:
        found[row.id, row.turn].append(row)
    return [
        row
        for turn, rows in found.items()
        if turn in wanted and {one.policy for one in rows} == set(policies)
        for row in rows
    ]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "cacheslide-agents", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
