"""Host memory for blocks of one geometry.

In: slots to take and give back, rows to write. Out: rows of one layer in any order, pages as bytes.
A block is contiguous, so that the memory in use grows and shrinks with the blocks in it and a page
is one buffer for a file read or write.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages.base import PAGE_TOKENS, LayerKV
from cacheslide_agents.pages.geometry import Geometry

Ints = npt.NDArray[np.int64]


class Arena:
    """`capacity` blocks [layers, 2, kv_heads, PAGE_TOKENS, head_dim].

    Memory is touched on use, but for a `pinned` one's, all of which is page-locked at once.
    """

    def __init__(self, geometry: Geometry, capacity: int, *, pinned: bool = False) -> None:
        self.geometry, self.capacity, self.pinned = geometry, capacity, pinned
        self._rows = self._allocate(capacity * geometry.layers * geometry.page_rows)
        bytes_ = self._rows.view(torch.uint8).numpy()
        self._bytes = bytes_.reshape(capacity, geometry.layers, geometry.page_bytes)
        planes = np.arange(2 * geometry.kv_heads, dtype=np.int64) * PAGE_TOKENS
        self._planes = torch.from_numpy(planes)[:, None]
        self._fresh = 0
        self._given_back: list[int] = []

    @classmethod
    def staging(cls, geometry: Geometry, capacity: int, *, layers: int | None = None) -> Arena:
        """A short-lived one, all of whose slots are taken, of all layers or of `layers`."""
        made = cls(replace(geometry, layers=layers or geometry.layers), capacity)
        made._fresh = capacity
        return made

    def _allocate(self, rows: int) -> Tensor:
        """Never an inference tensor: the store is written to in and out of inference mode."""
        shape = (rows, self.geometry.head_dim)
        try:
            with torch.inference_mode(False):
                return torch.empty(shape, dtype=self.geometry.torch_dtype, pin_memory=self.pinned)
        except RuntimeError as error:
            raise StoreError(
                f"the store cannot have {self.capacity * self.geometry.block_bytes} bytes of host "
                f"memory; give it a smaller budget ({error})"
            ) from error

    @property
    def used(self) -> int:
        """Slots taken."""
        return self._fresh - len(self._given_back)

    def take(self) -> int:
        """The lowest free slot; the caller has seen that there is one."""
        if self._given_back:
            return heappop(self._given_back)
        assert self._fresh < self.capacity
        self._fresh += 1
        return self._fresh - 1

    def give(self, slot: int) -> None:
        heappush(self._given_back, slot)

    def page(self, slot: int, layer: int) -> npt.NDArray[np.uint8]:
        """The bytes [page_bytes] of one page; writable."""
        page: npt.NDArray[np.uint8] = self._bytes[slot, layer]
        return page

    def read(self, slots: Ints, rows: Ints, layer: int) -> Tensor:
        """Tokens (slot, row) as [2, kv_heads, tokens, head_dim]; a copy, pinned if this is."""
        geometry = self.geometry
        index = self._index(slots, rows, layer)
        out = torch.empty(
            (len(index), geometry.head_dim), dtype=geometry.torch_dtype, pin_memory=self.pinned
        )
        torch.index_select(self._rows, 0, index, out=out)
        return out.view(2, geometry.kv_heads, len(slots), geometry.head_dim)

    def write(self, slots: Ints, rows: Ints, layer: int, pair: LayerKV) -> None:
        """`pair` [kv_heads, tokens, head_dim] each, to tokens (slot, row)."""
        both = torch.stack([tensor.detach() for tensor in pair]).to("cpu")
        index = self._index(slots, rows, layer)
        self._rows.index_copy_(0, index, both.view(-1, self.geometry.head_dim))

    def _index(self, slots: Ints, rows: Ints, layer: int) -> Tensor:
        """[2 * kv_heads * tokens], head by head."""
        tokens = (slots * self.geometry.layers + layer) * self.geometry.page_rows + rows
        return (torch.from_numpy(tokens) + self._planes).view(-1)
