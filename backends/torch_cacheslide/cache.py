"""The private slots of one request: rotated keys and values of every layer, and the rows in flight.

In: keys and values of the active rows, through transformers' cache interface. Out: all keys and
values of the layer, for attention. The memory (arena) is the backend's and serves request after
request; what outlives a request is copied into the page store.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.pages.loader import Loader
from cacheslide_agents.pages.slots import SlotMap
from cacheslide_agents.position.profile import CanonicalRows
from torch_cacheslide.correction import Correction
from torch_cacheslide.layout import Block, Layouts

CAPACITY_STEP = 256
Rows = npt.NDArray[np.int64]


class Arena:
    """Keys and values for one request at a time, [2, layers, kv_heads, capacity, head_dim]."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._memory = torch.empty(0)

    def take(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, kv_heads, >= tokens, head_dim]; the last taker's are gone."""
        layers, kv_heads, head_dim = self._shape
        if self._memory.dim() == 1 or self._memory.shape[3] < tokens:
            capacity = -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
            self._memory = torch.empty(0)  # let go before asking again: never hold both
            self._memory = torch.empty(
                2, layers, kv_heads, capacity, head_dim, dtype=self._dtype, device=self._device
            )
        return self._memory[0], self._memory[1]

    @property
    def nbytes(self) -> int:
        return self._memory.untyped_storage().nbytes()


class InFlight:
    """The rows the next layers compute: prompt indices, ascending, and where they are written."""

    def __init__(
        self,
        rows: Rows,
        device: torch.device,
        slots: SlotMap | None,
        canonical: CanonicalRows | None = None,
    ) -> None:
        self.rows, self._device, self._slots = rows, device, slots
        self.layouts = Layouts(rows, device, slots, canonical)

    @cached_property
    def home(self) -> Tensor | slice:
        """Their places among the home slots."""
        rows = self.rows
        if rows[-1] - rows[0] + 1 == len(rows):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return torch.from_numpy(rows).to(self._device)

    @cached_property
    def apart(self) -> Tensor:
        """Their places among all slots, in a layer that moved."""
        assert self._slots is not None
        return torch.from_numpy(self._slots.slots(self.rows)).to(self._device)


class WorkingCache:
    """What the decoder layers see as their cache while one request is answered.

    `keys` and `values` [layers, kv_heads, rows, head_dim] are the home slots; `spare` more lie
    before them. `captured[layer]` holds (rows, position-free keys [rows, kv_heads, head_dim]) of
    every row that was computed; they become the stored context when the request ends. While a
    `loader` is set, a layer's new keys and values meet its loaded ones here: they wait for the load
    and go home, or, with `slots`, go to fresh slots first if the load is not there yet. `canonical`
    is set for a prefill that runs rows under CCPE.
    """

    def __init__(self, keys: Tensor, values: Tensor, spare: int = 0) -> None:
        self._all_keys, self._all_values, self.spare = keys, values, spare
        self.keys, self.values = keys[:, :, spare:], values[:, :, spare:]
        self.captured: list[list[tuple[Rows, Tensor]]] = [[] for _ in keys]
        self.correction: Correction | None = None
        self.loader: Loader | None = None
        self.slots: SlotMap | None = None
        self.canonical: CanonicalRows | None = None
        self._flight = InFlight(np.zeros(1, dtype=np.int64), keys.device, None)
        self._positions = torch.zeros(self.keys.shape[2] + 1, dtype=torch.int64, device=keys.device)

    @property
    def captured_nbytes(self) -> int:
        return sum(keys.nbytes for layer in self.captured for _, keys in layer)

    @property
    def layouts(self) -> Layouts:
        """How the rows in flight attend."""
        return self._flight.layouts

    def set_rows(self, rows: Rows) -> None:
        """The prompt indices of the rows that the next layers will compute, ascending."""
        self._flight = InFlight(rows, self.keys.device, self.slots, self.canonical)

    def place(self, start: int, positions: Tensor) -> None:
        """Where rows from `start` on stand; for schemes that bias attention by position."""
        self._positions[start : start + len(positions)] = positions

    def positions_of(self, layer: int, block: Block) -> tuple[Tensor, Tensor]:
        """Positions of the rows in flight that `block` holds, and of the slots they see."""
        rows = self._flight.rows[block.start : block.stop]
        owners = np.arange(block.first, block.keys)
        if self.slots is not None and self.slots.moved(layer):
            owners = self.slots.owners(block.first, block.keys)
        here, there = (
            self._positions[torch.from_numpy(which).to(self._positions.device)]
            for which in (rows, owners)
        )
        return here, there

    def keep_apart(self, corrected: Rows, *, prompt: int) -> None:
        """From now on `corrected` rows may go to fresh slots, if there are any to spare."""
        if self.spare and len(corrected):
            rows = self.keys.shape[2]
            self.slots = SlotMap(corrected, prompt=prompt, rows=rows, spare=self.spare)
            self.set_rows(self._flight.rows)

    def capture(self, layer: int, keys: Tensor) -> None:
        """Position-free keys of the rows in flight, [1, rows, kv_heads * head_dim] or split."""
        _, kv_heads, _, head_dim = self.keys.shape
        self.captured[layer].append((self._flight.rows, keys.view(-1, kv_heads, head_dim)))

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' cache interface: write the rows in flight, return the whole layer."""
        if self.loader is not None:
            if self.slots is not None and not self.loader.ready(layer):
                self.slots.move(layer)
            else:
                self.loader.wait(layer)
        moved = self.slots is not None and self.slots.moved(layer)
        if moved:
            self._write(layer, keys[0], values[0])
        else:
            self._write_home(layer, keys[0], values[0])
        if moved and self.loader is not None:
            self.loader.wait(layer)
        every = (self._all_keys, self._all_values) if moved else (self.keys, self.values)
        return every[0][layer][None], every[1][layer][None]

    def values_of(self, layer: int, tokens: int) -> Tensor:
        """The values of rows [0, tokens), [kv_heads, tokens, head_dim], in order."""
        if self.slots is None or not self.slots.moved(layer):
            return self.values[layer][:, :tokens]
        rows = torch.from_numpy(self.slots.slots(np.arange(tokens))).to(self.values.device)
        return self._all_values[layer].index_select(1, rows)

    def keep(self, rows: Rows, *, behind: int) -> None:
        """Of the rows from `behind` on, keep `rows` (ascending): they move up, in order."""
        target = np.arange(behind, behind + len(rows))
        for layer, captured in enumerate(self.captured):
            moved = self.slots is not None and self.slots.moved(layer)
            every = (self._all_keys, self._all_values) if moved else (self.keys, self.values)
            places = (rows, target)
            if moved and self.slots is not None:
                places = (self.slots.slots(rows), self.slots.slots(target))
            source, goal = (torch.from_numpy(place).to(self.keys.device) for place in places)
            for tensor in every:
                tensor[layer].index_copy_(1, goal, tensor[layer].index_select(1, source))
            prompt = [(of, keys) for of, keys in captured if of[0] < behind]
            later = [(of, keys) for of, keys in captured if of[0] >= behind]
            self.captured[layer] = prompt
            if len(rows):
                found = np.searchsorted(np.concatenate([of for of, _ in later]), rows)
                index = torch.from_numpy(found).to(self.keys.device)
                kept = torch.cat([keys for _, keys in later]).index_select(0, index)
                self.captured[layer] = [*prompt, (target, kept)]

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._all_keys[layer].index_copy_(1, self._flight.apart, keys)
        self._all_values[layer].index_copy_(1, self._flight.apart, values)

    def _write_home(self, layer: int, keys: Tensor, values: Tensor) -> None:
        home, all_keys, all_values = self._flight.home, self.keys[layer], self.values[layer]
        if self.correction is not None:
            keys, values = self.correction.apply(keys, values, all_keys, all_values)
        if isinstance(home, slice):
            all_keys[:, home] = keys
            all_values[:, home] = values
        else:
            all_keys.index_copy_(1, home, keys)
            all_values.index_copy_(1, home, values)
