"""Attention by the fused kernels on CUDA, where they gain and have proved right on this device.

In: what `attention.attend` gets. Out: the same, from the kernel for CoPE layers and for selected
rows, from torch for the rest: whole prompts and single tokens of rotary models (torch has kernels
for those), several answers at once, MPT, shapes the kernels do not cover.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.kernels import Tiling, covers, fused_attention, has_triton
from torch_cacheslide.attention import (
    ATTENTION_NAME,
    FUSED_ATTENTION_NAME,
    attend,
    register_attention,
)
from torch_cacheslide.layout import Layouts

PROBE_KEYS = 300
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-3}
"""Largest difference from float64 that a trusted kernel has on numbers of size 1."""
log = logging.getLogger(__name__)


def attend_fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layouts,
    **others: Any,
) -> tuple[Tensor, None]:
    """Queries [1, heads, rows, head_dim] to [1, rows, heads, head_dim], as `attend` does."""
    embedding = getattr(module, "cope_embedding", None)
    layer = module.layer_idx
    assert isinstance(layer, int)
    wanted = embedding is not None or layout.selective(layer)
    places, masses = layout.places(layer) if wanted else None, layout.masses(layer)
    if places is None or not _trusted_for(query, key, embedding, places[1], masses):
        return attend(
            module, query, key, value, attention_mask, scaling=scaling, layout=layout, **others
        )
    rows, slots = places
    attended = fused_attention(
        query[0],
        key[0],
        value[0],
        rows,
        scale=scaling,
        embedding=embedding,
        slots=slots,
        masses=masses,
    )
    return attended.transpose(0, 1)[None], None


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for; `positions` 0: none that are contextual."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    groups: int
    positions: int
    tiling: Tiling
    slotted: bool = False
    massed: bool = False


def _trusted_for(
    query: Tensor,
    key: Tensor,
    embedding: Tensor | None,
    slots: Tensor | None,
    masses: Sequence[CanonicalMass],
) -> bool:
    _, heads, rows, head_dim = query.shape
    positions = 0 if embedding is None else embedding.shape[1]
    if not covers(query.dtype, head_dim, positions) or query.requires_grad:
        return False
    tiling = Tiling.of(rows, head_dim, query.dtype, embedding is not None)
    groups, slotted = heads // key.shape[1], slots is not None
    of_query = (query.device, query.dtype, head_dim)
    return trusted(Kind(*of_query, groups, positions, tiling, slotted, bool(masses)))


@cache
def trusted(kind: Kind) -> bool:
    """Whether this kernel runs here and agrees with torch; tried once, a warning says if not."""
    try:
        error = _probe(kind)
    except Exception:  # triton missing or too old, a tile too large for the device, ...
        log.warning("no fused kernel for %s: torch instead", kind, exc_info=True)
        return False
    if error > TOLERANCE[kind.dtype]:
        log.warning("fused kernel is %g off for %s: torch instead", error, kind)
        return False
    return True


def _probe(kind: Kind) -> float:
    """The largest difference from float64 for the last rows of a random prompt; NaN counts most."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind.device, kind.dtype)

    groups, head_dim, first = kind.groups, kind.head_dim, PROBE_KEYS - kind.tiling.rows
    rows = torch.arange(first, PROBE_KEYS, dtype=torch.int32, device=kind.device)
    query, key = normal(groups, len(rows), head_dim), normal(1, PROBE_KEYS, head_dim)
    value, scale = normal(1, PROBE_KEYS, head_dim), head_dim**-0.5
    embedding = normal(groups, kind.positions, head_dim) * 0.1 if kind.positions else None
    five = torch.full((groups,), 5.0, device=kind.device)
    masses = [CanonicalMass(first - 40, first, first, PROBE_KEYS, five)] if kind.massed else []
    order = torch.randperm(PROBE_KEYS, generator=generator).to(kind.device)
    slots = order if kind.slotted else None
    found = fused_attention(
        query,
        key,
        value,
        rows,
        scale=scale,
        embedding=embedding,
        slots=slots,
        masses=masses,
        tiling=kind.tiling,
    )
    if slots is not None:
        key, value = key[:, slots], value[:, slots]
    # Without contextual positions every key stands at the same one, which softmax does not see.
    table = query.new_zeros(groups, 1, head_dim) if embedding is None else embedding
    query, key, value, table = (each.double() for each in (query, key, value, table))
    wanted = contextual_attention(query, key, value, table, rows, scale=scale, masses=masses)
    return float((found.double() - wanted).abs().max().nan_to_num(nan=torch.inf))


def attention_for(device: str, kernels: bool) -> str:
    """The attention to load a model with; transformers knows it from here on."""
    register_attention()
    AttentionInterface.register(FUSED_ATTENTION_NAME, attend_fused)
    fused = kernels and device.startswith("cuda") and has_triton()
    return FUSED_ATTENTION_NAME if fused else ATTENTION_NAME
