"""The private slots of one request: rotated keys and values of every layer, and the rows in flight.

In: keys and values of the active rows, through transformers' cache interface. Out: all keys and
values of the layer, for attention. The memory (arena) is the backend's and serves request after
request; what outlives a request is copied into the page store.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_cacheslide.correction import Correction

CAPACITY_STEP = 256


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


class WorkingCache:
    """What the decoder layers see as their cache while one request is answered.

    `captured[layer]` holds (rows, position-free keys [rows, kv_heads, head_dim]) of every row that
    was computed; they become the stored context when the request ends.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.captured: list[list[tuple[npt.NDArray[np.int64], Tensor]]] = [[] for _ in keys]
        self.correction: Correction | None = None
        self._rows: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._index: Tensor | slice = slice(0, 0)

    @property
    def captured_nbytes(self) -> int:
        return sum(keys.nbytes for layer in self.captured for _, keys in layer)

    def set_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """The prompt indices of the rows that the next layers will compute, ascending."""
        self._rows = rows
        if rows[-1] - rows[0] + 1 == len(rows):
            self._index = slice(int(rows[0]), int(rows[-1]) + 1)
        else:
            self._index = torch.from_numpy(rows).to(self.keys.device)

    def capture(self, layer: int, keys: Tensor) -> None:
        """Position-free keys of the rows in flight, [1, rows, kv_heads * head_dim] or split."""
        _, kv_heads, _, head_dim = self.keys.shape
        self.captured[layer].append((self._rows, keys.view(-1, kv_heads, head_dim)))

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' cache interface: write the rows in flight, return the whole layer."""
        all_keys, all_values = self.keys[layer], self.values[layer]
        if self.correction is not None:
            keys, values = self.correction.apply(keys[0], values[0], all_keys, all_values)
        else:
            keys, values = keys[0], values[0]
        if isinstance(self._index, slice):
            all_keys[:, self._index] = keys
            all_values[:, self._index] = values
        else:
            all_keys.index_copy_(1, self._index, keys)
            all_values.index_copy_(1, self._index, values)
        return all_keys[None], all_values[None]
