"""Attention of a few query rows over all keys, for transformers' attention interface.

In: projected queries of the active rows, all keys and values, and a layout that says which rows see
which keys. Out: the attention output per row. Rows are prompt indices; the mask is key <= row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cacheslide_agents.pages.slots import SlotMap
from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.profile import CanonicalRows

ATTENTION_NAME = "cacheslide"
FUSED_ATTENTION_NAME = "cacheslide_fused"
UNIT_ROWS, BLOCK_ROWS = 32, 256
"""Rows the kernels like to see together: at least, and at most."""
TOLERATED_WASTE = 0.125
"""Share of masked-out pairs up to which one wider block beats two; see docs/decisions.md."""


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows [start, stop) of the batch see slots [first, keys), under `mask` or causally.

    `rows`: their prompt indices, where `mask` hides what comes later and nothing else.
    """

    start: int
    stop: int
    keys: int
    mask: Tensor | None
    causal: bool = False
    first: int = 0
    rows: Tensor | None = None


Layout = tuple[Block, ...]


class Layouts:
    """How ascending prompt indices `rows` attend: by default in order, elsewhere in moved layers.

    `slots` says which layers keep corrected rows in fresh slots; `None` where none can.
    `canonical`: rows that count what stands before them at its usual mass (CCPE).
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        device: torch.device,
        slots: SlotMap | None = None,
        canonical: CanonicalRows | None = None,
    ) -> None:
        self._rows, self._device, self._slots = rows, device, slots
        self._canonical = canonical

    def masses(self, layer: int) -> tuple[CanonicalMass, ...]:
        return () if self._canonical is None else self._canonical.of(layer)

    def of(self, layer: int) -> Layout:
        return self._apart if self._moved(layer) else self.in_order

    def pairs(self, layer: int) -> int:
        """Query-key pairs that attention looks at, the cost model's second term."""
        return attention_pairs(self._apart) if self._moved(layer) else self._pairs_in_order

    def selective(self, layer: int) -> bool:
        """Whether more than one row attends, and not a whole prompt in order."""
        rows = self._rows
        whole = rows[0] == 0 and rows[-1] == len(rows) - 1
        return len(rows) > 1 and (self._moved(layer) or not whole)

    def places(self, layer: int) -> tuple[Tensor, Tensor | None] | None:
        """The rows [r] int32, and the slots of all that stands before them if not in order.

        `None` where rows see something else than what stands before them.
        """
        return self._index, self._whereabouts if self._moved(layer) else None

    def _moved(self, layer: int) -> bool:
        return self._slots is not None and self._slots.moved(layer)

    @cached_property
    def _index(self) -> Tensor:
        return torch.from_numpy(self._rows.astype(np.int32)).to(self._device)

    @cached_property
    def _whereabouts(self) -> Tensor:
        assert self._slots is not None
        slots = self._slots.slots(np.arange(int(self._rows[-1]) + 1))
        return torch.from_numpy(slots).to(self._device)

    @cached_property
    def _pairs_in_order(self) -> int:
        return row_pairs(self._rows)

    @cached_property
    def in_order(self) -> Layout:
        return row_layout(self._rows, self._device)

    @cached_property
    def _apart(self) -> Layout:
        assert self._slots is not None
        return slot_layout(self._rows, self._slots, self._device)


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
        blocks.append(Block(start, stop, keys, mask, rows=index[start:stop]))
    return tuple(blocks)


def slot_layout(rows: npt.NDArray[np.int64], slots: SlotMap, device: torch.device) -> Layout:
    """The same over slots as they lie in a layer that moved, for rows [r] of one request."""
    index = torch.from_numpy(rows).to(device)
    blocks = []
    for start, stop in pairwise(_borders(rows)):
        first, end = slots.seen(int(rows[stop - 1]))
        owners = slots.owners(first, end)
        everything = bool((owners <= rows[start]).all())
        seen = torch.from_numpy(owners).to(device)[None, :] <= index[start:stop, None]
        blocks.append(Block(start, stop, end, None if everything else seen, first=first))
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


def row_pairs(rows: npt.NDArray[np.int64]) -> int:
    """The pairs of `row_layout(rows)`, without its masks."""
    count = len(rows)
    if count > 1 and rows[0] == 0 and rows[-1] == count - 1:
        return count * count // 2
    borders = pairwise(_borders(rows))
    return sum((stop - start) * (int(rows[stop - 1]) + 1) for start, stop in borders)


def attention_pairs(layout: Layout) -> int:
    """Query-key pairs the kernels look at: what attention costs, the cost model's second term."""
    return sum(
        (block.stop - block.start) * (block.keys - block.first) // (2 if block.causal else 1)
        for block in layout
    )


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
    keys, values = key[:, :, slots], value[:, :, slots]
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
