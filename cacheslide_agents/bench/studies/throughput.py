"""Throughput: what reuse is worth when many agents ask one engine at once.

In: changed turns of two agents in turn, dealt to sessions that each ask theirs one after another.
Out: `policies`, for each of them requests and tokens per second, how evenly they came, times to
first token and outcomes; `headline`, its ratios to vLLM alone; `rows`, every request. Declined
turns and fallbacks count with their own times.

The contexts that a policy reuses are made before its clock starts. Every prompt is stored for a
next turn, which is part of the price, and its prefix stays in vLLM's own cache, which every policy
finds empty.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

import numpy as np

from cacheslide_agents.answered import Pieces
from cacheslide_agents.backend import Backend, GenerationChunk, GenerationRequest, Sampling
from cacheslide_agents.bench.runner import Progress, silent
from cacheslide_agents.bench.task_data import ANSWERERS, TaskData
from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import BackendError, DataError
from cacheslide_agents.policies import Policy, named

POLICIES = ("recompute", "prefix", "cacheslide", "cache_blend", "epic")
BASELINES = ("recompute", "prefix")
Found = dict[str, Any]


@runtime_checkable
class Batches(Protocol):
    """A backend that computes requests of many callers together, and caches prefixes by itself."""

    def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]: ...
    def warm(self, request: GenerationRequest) -> None: ...
    def forget_prefixes(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """One changed turn: the prompt before and the prompt that is measured."""

    id: str
    turn: int
    previous: EncodedPrompt
    prompt: EncodedPrompt


@dataclass(frozen=True, slots=True)
class Served:
    """One request. Seconds since the policy's clock started; `tokens_s` of each output token."""

    id: str
    turn: int
    task: str
    session: int
    policy: str
    outcome: str
    reason: str
    prompt_tokens: int
    active_tokens: int
    sent_s: float
    ttft_s: float
    done_s: float
    tokens_s: list[float]


def run(
    backend: Backend,
    data: Path,
    *,
    save: Callable[[Mapping[str, Any]], None],
    progress: Progress = silent,
    sessions: int = 8,
    new_tokens: int = 32,
    limit: int = 16,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`limit` turns of each task, `sessions` at once, `new_tokens` for every answer.

    Policies that an `earlier` run has are kept. Raises `BackendError` for a backend that answers
    one request at a time.
    """
    if not isinstance(backend, Batches):
        raise BackendError(
            f"{backend.model_id}: this backend answers one request at a time, so there is no "
            "throughput to study; use --backend vllm"
        )
    source = TaskData.of(backend, data, limit=limit, seed=seed, max_prompt_tokens=max_prompt_tokens)
    turns = _dealt(source)
    about = {
        "model": backend.model_id,
        "sessions": sessions,
        "new_tokens": new_tokens,
        "turns": len(turns),
        "seed": seed,
    }
    known = _known(earlier, about)
    rows: list[Found] = list(known.get("rows", []))
    populated = {name: one["populate_s"] for name, one in known.get("policies", {}).items()}
    for number, name in enumerate(POLICIES, start=1):
        if name not in populated:
            populated[name], served = _measured(backend, name, turns, sessions, new_tokens)
            rows += [asdict(one) for one in served]
            save(_study(about, rows, populated))
        progress(number, len(POLICIES), name)
    return _study(about, rows, populated)


def _known(earlier: Mapping[str, Any] | None, about: Mapping[str, Any]) -> Mapping[str, Any]:
    """The earlier run, if it was like this one."""
    for name, mine in about.items() if earlier else ():
        if (theirs := (earlier or {}).get(name)) != mine:
            raise DataError(f"cannot resume: the file's {name} is {theirs!r}, not {mine!r}")
    return earlier or {}


def _dealt(source: TaskData) -> list[Asked]:
    """One of each task in turn, so that with an even number of sessions each has one task."""
    rounds = zip_longest(*(source.turns([task]) for task in ANSWERERS))
    return [
        Asked(turn.id, turn.turn, source.encode(turn.populate), source.encode(turn.measure))
        for turn in chain.from_iterable(rounds)
        if turn is not None
    ]


def _measured(
    backend: Batches, name: str, turns: Sequence[Asked], sessions: int, new_tokens: int
) -> tuple[float, list[Served]]:
    """Seconds of populating, and what was served after that."""
    backend.forget_prefixes()
    policy, run_id = named(name), uuid4().hex
    started = perf_counter()
    for number, turn in enumerate(turns):
        backend.warm(_request(turn.previous, policy, f"{run_id}-{number}", 1))
    populate_s = perf_counter() - started
    drive = _Drive(backend, name, policy, run_id, new_tokens)
    return populate_s, asyncio.run(drive.all(turns, sessions))


class _Drive:
    """One policy's requests, all sessions at once."""

    def __init__(
        self, backend: Batches, name: str, policy: Policy, run_id: str, new_tokens: int
    ) -> None:
        self._backend, self._name, self._policy = backend, name, policy
        self._run_id, self._new_tokens = run_id, new_tokens
        self._started = 0.0

    async def all(self, turns: Sequence[Asked], sessions: int) -> list[Served]:
        self._started = perf_counter()
        numbered = list(enumerate(turns))
        dealt = [self._session(each, numbered[each::sessions]) for each in range(sessions)]
        return list(chain.from_iterable(await asyncio.gather(*dealt)))

    async def _session(self, session: int, turns: Sequence[tuple[int, Asked]]) -> list[Served]:
        return [await self._serve(session, number, turn) for number, turn in turns]

    async def _serve(self, session: int, number: int, turn: Asked) -> Served:
        request = _request(turn.prompt, self._policy, f"{self._run_id}-{number}", self._new_tokens)
        sent, pieces = self._now(), Pieces(self._started)
        async with aclosing(self._backend.agenerate(request)) as stream:
            async for piece in stream:
                pieces.add(piece)
        answer = pieces.whole(turn.id)
        return Served(
            id=turn.id,
            turn=turn.turn,
            task=turn.prompt.task,
            session=session,
            policy=self._name,
            outcome=answer.receipt.outcome,
            reason=answer.receipt.reason,
            prompt_tokens=answer.receipt.prompt_tokens,
            active_tokens=answer.receipt.active_tokens,
            sent_s=sent,
            ttft_s=answer.ttft_s - sent,
            done_s=self._now(),
            tokens_s=list(answer.times_s),
        )

    def _now(self) -> float:
        return perf_counter() - self._started


def _request(
    prompt: EncodedPrompt, policy: Policy, namespace: str, max_tokens: int
) -> GenerationRequest:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest.of(prompt, namespace=namespace, sampling=sampling, policy=policy)


def _study(
    about: Mapping[str, Any], rows: Sequence[Found], populated: Mapping[str, float]
) -> Found:
    figures = {
        name: {**_figures([row for row in rows if row["policy"] == name]), "populate_s": seconds}
        for name, seconds in populated.items()
    }
    return {**about, "policies": figures, "headline": _headline(figures), "rows": list(rows)}


def _figures(rows: Sequence[Found]) -> Found:
    """`tokens_std`: of output tokens per second, over the whole seconds of the run."""
    seconds = max(row["done_s"] for row in rows)
    tokens = np.concatenate([np.asarray(row["tokens_s"]) for row in rows])
    whole = max(1, int(seconds))
    per_second = np.bincount(tokens.astype(int), minlength=whole)[:whole]
    first = [row["ttft_s"] for row in rows]
    return {
        "requests": len(rows),
        "seconds": seconds,
        "requests_per_s": len(rows) / seconds,
        "tokens_per_s": len(tokens) / seconds,
        "tokens_std": float(per_second.std()),
        "ttft_p50_s": float(np.percentile(first, 50)),
        "ttft_p99_s": float(np.percentile(first, 99)),
        "compute_fraction": sum(row["active_tokens"] for row in rows)
        / sum(row["prompt_tokens"] for row in rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
    }


def _headline(figures: Mapping[str, Found]) -> Found:
    """Requests per second over those of vLLM without its cache and with it, all rows counted."""
    return {
        name: {
            f"vs_{baseline}": mine["requests_per_s"] / figures[baseline]["requests_per_s"]
            for baseline in BASELINES
            if baseline in figures
        }
        for name, mine in figures.items()
        if name not in BASELINES
    }
