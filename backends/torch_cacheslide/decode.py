"""Decoding: tokens on top of a prefilled working cache.

In: the tokens of an answer, as they are chosen. Out: logits after each of them. `Branches` does the
same for several answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.position.base import Position
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.stack import DecoderStack


class Growth(Protocol):
    """Where the keys and values of generated tokens go."""

    def grow(self, tokens: Sequence[int], tips: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """One token [b] for every answer that goes on after row `tips` [b].

        Returns logits [b, vocabulary] and the rows of the new tokens.
        """

    def keep(self, tip: int) -> list[int]:
        """The tokens up to row `tip`, which now lie right behind the prompt."""


class Continuation:
    """Appends tokens after a prompt of `length` tokens whose next position is `next_position`.

    `tokens` are those that went through the layers, and so have keys and values.
    """

    def __init__(
        self,
        stack: DecoderStack,
        position: Position,
        cache: WorkingCache,
        *,
        length: int,
        next_position: int,
    ) -> None:
        self._stack, self._position, self._cache = stack, position, cache
        self._row, self._next_position = length, next_position
        self.tokens: list[int] = []
        cache.correction = None

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Run `tokens` [t] through the layers; logits [t, vocabulary] after each of them."""
        count, device = len(tokens), self._stack.device
        rows = np.arange(self._row, self._row + count, dtype=np.int64)
        positions = torch.arange(self._next_position, self._next_position + count, device=device)
        cos_sin = self._position.cos_sin(positions, self._stack.dtype)
        self._cache.place(self._row, positions)
        self._cache.set_rows(rows)
        logits = self._stack.forward(tokens, cos_sin, self._cache, self._cache.layouts)
        self._row += count
        self._next_position += count
        self.tokens += tokens
        return logits

    def grow(self, tokens: Sequence[int], tips: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """For a single answer, which always goes on after its last token."""
        return self.append(tokens), [self._row - 1]

    def keep(self, tip: int) -> list[int]:
        """All of them are one answer's."""
        return self.tokens
