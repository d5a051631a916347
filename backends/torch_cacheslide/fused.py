"""Attention by the fused kernels on CUDA, where they gain and have proved right on this device.

In: what `attention.attend` gets. Out: the same, from the kernel for CoPE layers and for selected
rows, from torch for the rest: whole prompts and single tokens of rotary models (torch has kernels
for those), several answers at once, MPT, shapes the kernels do not cover.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cacheslide_agents.position.contextual import contextual_attention
from cacheslide_agents.position.kernels import Tiling, covers, fused_attention, has_triton
from torch_cacheslide.attention import ATTENTION_NAME, Layouts, attend, register_attention

FUSED_ATTENTION_NAME = "cacheslide_fused"
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
    places = layout.places(layer) if wanted else None
    if places is None or not _trusted_for(query, key, embedding):
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
        masses=layout.masses(layer),
    )
    return attended.transpose(0, 1)[None], None


def _trusted_for(query: Tensor, key: Tensor, embedding: Tensor | None) -> bool:
    _, heads, rows, head_dim = query.shape
    positions = 0 if embedding is None else embedding.shape[1]
    if not covers(query.dtype, head_dim, positions) or query.requires_grad:
        return False
    tiling = Tiling.of(rows, head_dim, query.dtype, embedding is not None)
    return trusted(query.device, query.dtype, head_dim, heads // key.shape[1], positions, tiling)


@cache
def trusted(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
    positions: int,
    tiling: Tiling,
) -> bool:
    """Whether this kernel runs here and agrees with torch; tried once, a warning says if not."""
    try:
        error = _probe(device, dtype, head_dim, groups, positions, tiling)
    except Exception:  # triton missing or too old, a tile too large for the device, ...
        log.warning("no fused kernel for %s on %s: torch instead", dtype, device, exc_info=True)
        return False
    if error > TOLERANCE[dtype]:
        log.warning("fused kernel is %g off for %s on %s: torch instead", error, dtype, device)
        return False
    return True


def _probe(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
    positions: int,
    tiling: Tiling,
) -> float:
    """The largest difference from float64 for the last rows of a random prompt; NaN counts most."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows = torch.arange(PROBE_KEYS - tiling.rows, PROBE_KEYS, dtype=torch.int32, device=device)
    query, key = normal(groups, tiling.rows, head_dim), normal(1, PROBE_KEYS, head_dim)
    value, scale = normal(1, PROBE_KEYS, head_dim), head_dim**-0.5
    embedding = normal(groups, positions, head_dim) * 0.1 if positions else None
    found = fused_attention(
        query, key, value, rows, scale=scale, embedding=embedding, tiling=tiling
    )
    # Without contextual positions every key stands at the same one, which softmax does not see.
    table = query.new_zeros(groups, 1, head_dim) if embedding is None else embedding
    wanted = contextual_attention(
        query.double(), key.double(), value.double(), table.double(), rows, scale=scale
    )
    return float((found.double() - wanted).abs().max().nan_to_num(nan=torch.inf))


def attention_for(device: str, kernels: bool) -> str:
    """The attention to load a model with; transformers knows it from here on."""
    register_attention()
    AttentionInterface.register(FUSED_ATTENTION_NAME, attend_fused)
    fused = kernels and device.startswith("cuda") and has_triton()
    return FUSED_ATTENTION_NAME if fused else ATTENTION_NAME
