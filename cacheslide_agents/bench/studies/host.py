"""A host without a model: plans, loads and stores as a backend does, and sleeps where it computes.

In: prompts of many agents, a page store. Out: what each turn took from the store and waited for it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from time import perf_counter, sleep

import numpy as np
import torch

from cacheslide_agents.chunks import EncodedPrompt
from cacheslide_agents.errors import ReuseError
from cacheslide_agents.pages import (
    ContextKey,
    Lease,
    PageStore,
    ReusedRun,
    StoredContext,
    TokenRange,
)
from cacheslide_agents.pages.loader import AheadLoader
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.planner import dense_plan, make_plan

DEPTH = 4
_POOL_TOKENS = 8192


@dataclass(frozen=True)
class Spent:
    """Sums over turns. `put_wait_s`: stalls of the store while a turn is stored."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    active_tokens: int = 0
    fallbacks: int = 0
    load_wait_s: float = 0.0
    put_wait_s: float = 0.0
    total_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Host:
    """One worker with a store. `geometry`: layers, KV heads, head size; `row_s`: seconds that one
    active row computes, all layers together."""

    def __init__(self, store: PageStore, geometry: tuple[int, int, int], row_s: float) -> None:
        self._store, self._row_s = store, row_s
        self._layers, kv_heads, head_dim = geometry
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.randn(2, kv_heads, _POOL_TOKENS, head_dim, generator=generator)
        self._policy = CacheSlide()
        self._cost = CostModel.from_geometry(
            layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64
        )

    def turn(self, session: str, task: str, prompt: EncodedPrompt) -> Spent:
        """Answer one prompt and store it for the session's next turn."""
        started = perf_counter()
        ids = np.asarray(prompt.ids, dtype=np.int64)
        key = ContextKey("pressure", "default", task)
        plan = make_plan(ids, prompt.spans, key, session, self._policy, self._store, self._cost)
        fallbacks, waited = 0, 0.0
        with self._store.lease({planned.source for planned in plan.runs}) as lease:
            try:
                waited = self._prefill(plan)
            except ReuseError as lost:
                fallbacks, reason = 1, str(lost)
                plan = dense_plan(
                    ids, prompt.spans, self._policy, outcome="fallback", reason=reason
                )
                self._compute(plan, self._layers)
            stalled = self._remember(plan, key, session, lease)
        return Spent(
            prompt_tokens=len(ids),
            reused_tokens=int((plan.hit & ~plan.active).sum()),
            active_tokens=int(plan.active.sum()),
            fallbacks=fallbacks,
            load_wait_s=waited,
            put_wait_s=stalled,
            total_s=perf_counter() - started,
        )

    def _prefill(self, plan: Plan) -> float:
        """Seconds that computation waited for loads."""
        if not plan.runs:
            self._compute(plan, self._layers)
            return 0.0
        loader = AheadLoader(lambda layer: self._load(plan, layer), self._layers, DEPTH)
        try:
            for layer in range(self._layers):
                loader.enter(layer)
                loader.wait(layer)
                self._compute(plan, 1)
        finally:
            loader.close()
        return loader.wait_s

    def _load(self, plan: Plan, layer: int) -> None:
        ranges: dict[StoredContext, list[TokenRange]] = {}
        for planned in plan.runs:
            run = planned.run
            ranges.setdefault(planned.source, []).append((run.cached_start, run.cached_stop))
        for source, wanted in ranges.items():
            self._store.load(source, layer, wanted)

    def _compute(self, plan: Plan, layers: int) -> None:
        sleep(self._row_s * int(plan.active.sum()) * layers / self._layers)

    def _remember(self, plan: Plan, key: ContextKey, session: str, lease: Lease) -> float:
        """Seconds that the store stalled its caller."""
        corrected = plan.hit & plan.active
        reused = [
            ReusedRun(
                planned.source,
                run.start,
                run.cached_start,
                run.length,
                corrected[run.start : run.stop],
            )
            for planned in plan.runs
            for run in [planned.run]
        ]
        count = len(plan.ids)
        context = StoredContext(key, plan.ids, plan.exact, plan.spans, session)
        pair = (self._pool[0][:, :count], self._pool[1][:, :count])
        before = self._store.metrics()["stall_s"]
        self._store.put(context, [pair] * self._layers, reused=reused, lease=lease)
        return self._store.metrics()["stall_s"] - before
