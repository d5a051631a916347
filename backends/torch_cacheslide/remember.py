"""What outlives a request: its prompt and output become a cached context for the next turn.

In: a finished request's plan and working cache. Out: compact tensors in the page store. Runs after
the answer is out, so none of this is on the way to the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.pages.base import ContextKey, LayerKV, PageStore, StoredContext
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.position.rotary import Rotary
from torch_cacheslide.cache import WorkingCache


def remember(
    store: PageStore,
    rotary: Rotary,
    key: ContextKey,
    plan: Plan,
    cache: WorkingCache,
    *,
    generated: Sequence[int] = (),
    session: str | None = None,
    isolated: bool = False,
    residuals: Mapping[int, Tensor] | None = None,
) -> bool:
    """Store prompt plus `generated` (those that went through the layers); false if refused."""
    exact = np.concatenate([plan.exact, np.full(len(generated), bool(plan.exact.all()))])
    context = StoredContext(
        key=key,
        ids=np.concatenate([plan.ids, np.asarray(generated, dtype=np.int64)]),
        exact=exact,
        spans=plan.spans,
        session=session,
        isolated=isolated,
    )
    layers = [
        (_free_keys(store, rotary, plan, cache, layer, len(context)), values)
        for layer, values in enumerate(cache.values[:, :, : len(context)].unbind(0))
    ]
    return store.put(context, [(keys, values.clone()) for keys, values in layers], residuals)


def _free_keys(
    store: PageStore, rotary: Rotary, plan: Plan, cache: WorkingCache, layer: int, tokens: int
) -> Tensor:
    """Position-free keys [kv_heads, tokens, head_dim]: reused as they were, new as captured."""
    rotated = cache.keys[layer]
    keys = rotated.new_empty(rotated.shape[0], tokens, rotated.shape[2])
    for planned in plan.runs:
        run = planned.run
        cached: LayerKV = store.load(planned.source, layer)
        keys[:, run.start : run.stop] = cached[0][:, run.cached_start : run.cached_stop]
    for rows, captured in cache.captured[layer]:
        keys.index_copy_(1, torch.from_numpy(rows).to(keys.device), captured.transpose(0, 1))
    if plan.policy.fusion.needs_cached and plan.runs and cache.captured[layer]:
        _unrotate_fused(rotary, plan, cache, layer, keys)
    return keys


def _unrotate_fused(
    rotary: Rotary, plan: Plan, cache: WorkingCache, layer: int, keys: Tensor
) -> None:
    """Fused keys exist only rotated, in the working cache."""
    computed = np.concatenate([rows for rows, _ in cache.captured[layer]])
    hits = np.concatenate([np.arange(p.run.start, p.run.stop) for p in plan.runs])
    fused = np.intersect1d(computed, hits)
    index = torch.from_numpy(fused).to(keys.device)
    wide = torch.promote_types(keys.dtype, torch.float32)
    cos, sin = rotary.cos_sin(torch.from_numpy(plan.positions[fused]).to(keys.device), wide)
    free = rotary.unrotate(cache.keys[layer].index_select(1, index), cos, sin)
    keys.index_copy_(1, index, free.to(keys.dtype))
