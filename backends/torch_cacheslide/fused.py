"""Attention by the fused kernels on CUDA, where they gain and have proved right on this device.

In: what `attention.attend` gets. Out: the same, from the kernel for CoPE layers and for selected
rows, from torch for the rest: whole prompts and single tokens of rotary models (torch has kernels
for those), several answers at once, MPT, shapes the kernels do not cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from cacheslide_agents.position.contextual import CanonicalMass
from cacheslide_agents.position.kernels import fused_attention, has_triton
from cacheslide_agents.position.kernels.trust import Kind, trusted
from torch_cacheslide.attention import (
    ATTENTION_NAME,
    FUSED_ATTENTION_NAME,
    attend,
    register_attention,
)
from torch_cacheslide.layout import Layouts


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


def _trusted_for(
    query: Tensor,
    key: Tensor,
    embedding: Tensor | None,
    slots: Tensor | None,
    masses: Sequence[CanonicalMass],
) -> bool:
    if query.requires_grad:
        return False
    kind = Kind.of(
        query[0],
        key.shape[1],
        positions=0 if embedding is None else embedding.shape[1],
        slotted=slots is not None,
        massed=bool(masses),
    )
    return kind.covered and trusted(kind)


def attention_for(device: str, kernels: bool) -> str:
    """The attention to load a model with; transformers knows it from here on."""
    register_attention()
    AttentionInterface.register(FUSED_ATTENTION_NAME, attend_fused)
    fused = kernels and device.startswith("cuda") and has_triton()
    return FUSED_ATTENTION_NAME if fused else ATTENTION_NAME
