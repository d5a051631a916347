"""Which query rows see which keys, and in which blocks attention computes them.

In: prompt indices of the rows in flight, and where corrected rows lie. Out: blocks of rows that
attention computes together. The mask is key <= row throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.pages.slots import SlotMap
from cacheslide_agents.position.contextual import CanonicalMass
from cacheslide_agents.position.profile import CanonicalRows

UNIT_ROWS, BLOCK_ROWS = 32, 256
"""Rows the kernels like to see together: at least, and at most."""
TOLERATED_WASTE = 0.125
"""Share of masked-out pairs up to which one wider block beats two; see docs/decisions.md."""
LONG_RUN = 64
"""Rows side by side from which on they are a block of their own, without a mask."""


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows [start, stop) of the batch see slots [first, keys), under `mask` or causally.

    `causal`: the rows are the last of these slots, in order; each sees itself and what lies before.
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

    Rows side by side are one causal block; otherwise blocks keep the masked-out part of the work
    small.
    """
    index = torch.from_numpy(rows).to(device)
    blocks = []
    for start, stop, causal in _cuts(rows):
        keys = int(rows[stop - 1]) + 1
        if causal or stop - start == 1:
            blocks.append(Block(start, stop, keys, None, causal=causal))
        else:
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


def _cuts(rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """Blocks [start, stop) of ascending `rows`, and whether a block's rows are side by side."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    scattered = 0
    for start, stop in pairwise([0, *breaks.tolist(), len(rows)]):
        alone = stop - start == len(rows) > 1
        if alone or stop - start >= LONG_RUN:
            yield from _scattered(rows, scattered, start)
            yield start, stop, True
            scattered = stop
    yield from _scattered(rows, scattered, len(rows))


def _scattered(
    rows: npt.NDArray[np.int64], start: int, stop: int
) -> Iterator[tuple[int, int, bool]]:
    if start < stop:
        for one, other in pairwise(_borders(rows[start:stop])):
            yield start + one, start + other, False


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
    return sum(
        _pairs(stop - start, int(rows[stop - 1]) + 1, causal=causal)
        for start, stop, causal in _cuts(rows)
    )


def attention_pairs(layout: Layout) -> int:
    """Query-key pairs the kernels look at: what attention costs, the cost model's second term."""
    return sum(
        _pairs(block.stop - block.start, block.keys - block.first, causal=block.causal)
        for block in layout
    )


def _pairs(rows: int, keys: int, *, causal: bool) -> int:
    return rows * keys - (rows * rows // 2 if causal else 0)
