"""Attention of a few query rows over all keys, for transformers' attention interface.

In: projected queries of the active rows, all keys and values, and a layout that says which rows see
which keys. Out: the attention output per row. Rows are prompt indices; the mask is key <= row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "cacheslide"
UNIT_ROWS, BLOCK_ROWS = 32, 256
"""Rows the kernels like to see together: at least, and at most."""
TOLERATED_WASTE = 0.125
"""Share of masked-out pairs up to which one wider block beats two; see docs/decisions.md."""


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows [start, stop) of the batch attend to keys [0, keys), under `mask` or causally."""

    start: int
    stop: int
    keys: int
    mask: Tensor | None
    causal: bool = False


Layout = tuple[Block, ...]


def row_layout(rows: npt.NDArray[np.int64], device: torch.device) -> Layout:
    """How ascending prompt indices `rows` [r] attend: blocks never look past their last row.

    A whole prompt is one causal block; otherwise blocks keep the masked-out part of the work small.
    """
    count = len(rows)
    if count == 1:
        return (Block(0, 1, int(rows[0]) + 1, None),)
    if rows[0] == 0 and rows[-1] == count - 1:
        return (Block(0, count, count, None, causal=True),)
    index = torch.from_numpy(rows).to(device)
    borders = _borders(rows)
    blocks = []
    for start, stop in pairwise(borders):
        keys = int(rows[stop - 1]) + 1
        mask = torch.arange(keys, device=device)[None, :] <= index[start:stop, None]
        blocks.append(Block(start, stop, keys, mask))
    return tuple(blocks)


def _borders(rows: npt.NDArray[np.int64]) -> list[int]:
    """Where to cut ascending `rows` into blocks so that little of their work is masked out."""
    seen = np.concatenate([[0], np.cumsum(rows + 1)])
    borders = [0]
    for start in range(UNIT_ROWS, len(rows), UNIT_ROWS):
        stop = min(start + UNIT_ROWS, len(rows))
        pairs = (stop - borders[-1]) * (rows[stop - 1] + 1)
        waste = pairs - (seen[stop] - seen[borders[-1]])
        if stop - borders[-1] > BLOCK_ROWS or waste > TOLERATED_WASTE * pairs:
            borders.append(start)
    return [*borders, len(rows)]


def attention_pairs(layout: Layout) -> int:
    """Query-key pairs the kernels look at: what attention costs, the cost model's second term."""
    return sum(
        (block.stop - block.start) * block.keys // (2 if block.causal else 1) for block in layout
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    **_: Any,
) -> tuple[Tensor, None]:
    """Queries [1, heads, rows, head_dim], keys [1, kv_heads, capacity, head_dim].

    Returns [1, rows, heads, head_dim]. `layout` comes through the layer's keyword arguments.
    """
    outputs = [_attend_block(query, key, value, scaling, block) for block in layout]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2), None


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, block: Block
) -> Tensor:
    keys, values = key[:, :, : block.keys], value[:, :, : block.keys]
    if block.mask is not None and keys.is_cuda:  # the memory-efficient kernel takes masks, not GQA
        groups = query.shape[1] // key.shape[1]
        keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, values))
    return scaled_dot_product_attention(
        query[:, :, block.start : block.stop],
        keys,
        values,
        attn_mask=block.mask,
        is_causal=block.causal,
        scale=scaling,
        enable_gqa=keys.shape[1] != query.shape[1],
    )


def register_attention() -> None:
    """Make `attn_implementation="cacheslide"` known to transformers; safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, attend)
