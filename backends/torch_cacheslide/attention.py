"""Attention of a few query rows over all keys, for transformers' attention interface.

In: projected queries of the active rows, all keys and values, and a layout that says which rows see
which keys. Out: the attention output per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from torch_cacheslide.layout import Block, Layouts

ATTENTION_NAME = "cacheslide"
FUSED_ATTENTION_NAME = "cacheslide_fused"
_FLASH_ON_CPU: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""Not public, so a later PyTorch may lack it; then a mask does its work, slower."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layouts,
    **_: Any,
) -> tuple[Tensor, None]:
    """Queries [1, heads, rows, head_dim], keys [1, kv_heads, capacity, head_dim].

    Returns [1, rows, heads, head_dim]. `layout` comes through the layer's keyword arguments.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    embedding = getattr(module, "cope_embedding", None)
    masses = layout.masses(layer)
    outputs = [
        _attend_block(query, key, value, scaling, block)
        if embedding is None
        else _attend_contextually(query, key, value, embedding, scaling, block, masses)
        for block in layout.of(layer)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2), None


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, block: Block
) -> Tensor:
    slots = slice(block.first, block.keys)
    queries, keys, values = (
        query[:, :, block.start : block.stop],
        key[:, :, slots],
        value[:, :, slots],
    )
    count, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    mask = block.mask
    if block.causal and before:
        if keys.device.type == "cpu" and _FLASH_ON_CPU is not None:
            return _attend_behind(queries, keys, values, scaling)
        mask = causal_lower_right(count, before + count)  # never a tensor where kernels know it
    if mask is not None and keys.is_cuda:  # the memory-efficient kernel takes masks, not GQA
        groups = query.shape[1] // key.shape[1]
        keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, values))
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=block.causal and mask is None,
        scale=scaling,
        enable_gqa=keys.shape[1] != query.shape[1],
    )


def _attend_behind(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of the last rows of `key`, without a mask.

    The kernel's own causal mask begins at the first key. So what lies before the rows is attended
    to apart from the rows themselves, and the two are joined by their softmax sums, as blocks are
    in FlashAttention (Dao et al., 2022).
    """
    before = key.shape[2] - query.shape[2]
    earlier, earlier_sum = _FLASH_ON_CPU(
        query, key[:, :, :before], value[:, :, :before], scale=scaling
    )
    own, own_sum = _FLASH_ON_CPU(
        query, key[:, :, before:], value[:, :, before:], is_causal=True, scale=scaling
    )
    share = torch.sigmoid(own_sum - earlier_sum).to(own.dtype)
    return torch.lerp(earlier, own, share[..., None])


def _attend_contextually(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embedding: Tensor,
    scaling: float,
    block: Block,
    masses: tuple[CanonicalMass, ...],
) -> Tensor:
    """CoPE counts keys in their order, which is that of the slots unless corrected rows moved."""
    start, stop, keys = block.start, block.stop, block.keys
    rows, seen = block.rows, None
    if rows is None:
        rows = torch.arange(keys - (stop - start), keys, device=query.device)
        if block.mask is not None:
            rows, seen = torch.full_like(rows, keys - 1), block.mask
    attended = contextual_attention(
        query[0, :, start:stop],
        key[0, :, :keys],
        value[0, :, :keys],
        embedding,
        rows,
        scale=scaling,
        masses=masses,
        seen=seen,
    )
    return attended[None]


def register_attention() -> None:
    """Make `attn_implementation="cacheslide"` known to transformers; safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, attend)
