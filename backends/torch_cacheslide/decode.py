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
    """Appends tokens after a prompt of `length` tokens whose next position is `position`.

    `tokens` are those that went through the layers, and so have keys and values.
    """

    def __init__(
        self,
        stack: DecoderStack,
        rotary: Position,
        cache: WorkingCache,
        *,
        length: int,
        position: int,
    ) -> None:
        self._stack, self._rotary, self._cache = stack, rotary, cache
        self._row, self._position = length, position
        self.tokens: list[int] = []
        cache.correction = None

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Run `tokens` [t] through the layers; logits [t, vocabulary] after each of them."""
        count, device = len(tokens), self._stack.device
        rows = np.arange(self._row, self._row + count, dtype=np.int64)
        positions = torch.arange(self._position, self._position + count, device=device)
        cos, sin = self._rotary.cos_sin(positions, self._stack.dtype)
        self._cache.place(self._row, positions)
        self._cache.set_rows(rows)
        layouts = self._cache.layouts
        hidden = self._stack.embed(torch.tensor(tokens, device=device))
        for layer in range(self._stack.layers):
            hidden = self._stack.layer(layer, hidden, (cos[None], sin[None]), self._cache, layouts)
        self._row += count
        self._position += count
        self.tokens += tokens
        return self._stack.logits(hidden)

    def grow(self, tokens: Sequence[int], tips: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """For a single answer, which always goes on after its last token."""
        return self.append(tokens), [self._row - 1]

    def keep(self, tip: int) -> list[int]:
        """All of them are one answer's."""
        return self.tokens
