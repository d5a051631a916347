"""What outlives a request: its prompt and output become a cached context for the next turn.

In: a finished request's plan and working cache. Out: compact tensors in the page store, and word of
what was reused unchanged, which a store may share. Runs after the answer is out, so none of this is
on the way to the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages.base import ContextKey, LayerKV, PageStore, StoredContext
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.policies.kept import exact_with, reused_runs
from cacheslide_agents.position.base import Position
from torch_cacheslide.cache import WorkingCache

Rows = npt.NDArray[np.int64]


class Refresh(StrEnum):
    """What becomes of reused tokens that were recomputed: their new keys and values are stored,
    or the old ones stay."""

    CORRECTED = "corrected"
    NEVER = "never"

    @classmethod
    def of(cls, value: str) -> Refresh:
        if value not in list(cls):
            raise RequestError(f"refresh={value!r} must be 'corrected' or 'never'")
        return cls(value)


def remember(
    store: PageStore,
    position: Position,
    key: ContextKey,
    plan: Plan,
    cache: WorkingCache,
    *,
    generated: Sequence[int] = (),
    session: str | None = None,
    isolated: bool = False,
    residuals: Mapping[int, Tensor] | None = None,
    refresh: Refresh = Refresh.CORRECTED,
    lease: Lease | None = None,
) -> bool:
    """Store prompt plus `generated` (those that went through the layers); false if refused.

    `lease` holds the contexts that `plan` reuses.
    """
    corrected = corrected_rows(plan, cache)
    prompt_exact = plan.exact
    if refresh is Refresh.NEVER:
        prompt_exact = np.logical_and.accumulate(plan.exact & ~corrected)
        corrected = np.zeros_like(corrected)
    context = StoredContext(
        key=key,
        ids=np.concatenate([plan.ids, np.asarray(generated, dtype=np.int64)]),
        exact=exact_with(prompt_exact, len(generated)),
        spans=plan.spans,
        session=session,
        isolated=isolated,
    )
    layers = [
        (_free_keys(store, position, plan, cache, layer, len(context)), values)
        for layer in range(len(cache.captured))
        for values in [cache.values_of(layer, len(context))]
    ]
    return store.put(context, layers, residuals, reused_runs(plan.runs, corrected), lease)


def corrected_rows(plan: Plan, cache: WorkingCache) -> npt.NDArray[np.bool_]:
    """[n]: reused rows that some layer computed, layers that ran only to choose rows aside."""
    first = plan.narrow.layer + 1 if plan.narrow else 0
    computed = np.zeros(len(plan.ids), dtype=np.bool_)
    for captured in cache.captured[first:]:
        for rows, _ in captured:
            computed[rows[rows < len(computed)]] = True
    return computed & plan.hit


def _free_keys(
    store: PageStore, position: Position, plan: Plan, cache: WorkingCache, layer: int, tokens: int
) -> Tensor:
    """Position-free keys [kv_heads, tokens, head_dim] of all rows but those reused unchanged."""
    rotated = cache.keys[layer]
    keys = rotated.new_zeros(rotated.shape[0], tokens, rotated.shape[2])
    if plan.policy.gate is not None:
        _put_cached(store, plan, layer, keys)
    for rows, captured in cache.captured[layer]:
        keys.index_copy_(1, torch.from_numpy(rows).to(keys.device), captured.transpose(0, 1))
    if plan.policy.fusion.needs_cached and plan.runs and cache.captured[layer]:
        _unrotate_fused(position, plan, cache, layer, keys)
    return keys


def _put_cached(store: PageStore, plan: Plan, layer: int, keys: Tensor) -> None:
    """A row that a gate let go, or took in later, keeps its cached keys in the other layers."""
    for planned in plan.runs:
        run = planned.run
        cached: LayerKV = store.load(planned.source, layer)
        there = cached[0][:, run.cached_start : run.cached_stop]
        keys[:, run.start : run.stop] = there.to(keys.device)


def _unrotate_fused(
    position: Position, plan: Plan, cache: WorkingCache, layer: int, keys: Tensor
) -> None:
    """Fused keys exist only rotated, in the working cache."""
    computed = np.concatenate([rows for rows, _ in cache.captured[layer]])
    hits = np.concatenate([np.arange(p.run.start, p.run.stop) for p in plan.runs])
    fused = np.intersect1d(computed, hits)
    index = torch.from_numpy(fused).to(keys.device)
    wide = torch.promote_types(keys.dtype, torch.float32)
    cos, sin = position.cos_sin(torch.from_numpy(plan.positions[fused]).to(keys.device), wide)
    free = position.unrotate(cache.keys[layer].index_select(1, index), cos, sin)
    keys.index_copy_(1, index, free.to(keys.dtype))
