"""Several answers to one prompt, decoded as one batch that shares the prompt's keys and values.

In: the tokens that go on, and after which tokens. Out: logits. The prompt's rows are held once.
Every generated token has a row of its own behind them and knows which row it follows, so that an
answer is a path in a tree: branching, dropping and reordering answers copies nothing but a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.position.base import Position
from torch_cacheslide.cache import WorkingCache
from torch_cacheslide.layout import Block, Layout, Layouts
from torch_cacheslide.stack import DecoderStack

Rows = npt.NDArray[np.int64]


class Branches:
    """Grows answers after a prompt of `length` rows whose next position is `next_position`."""

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
        self._length, self._row, self._next_position = length, length, next_position
        self._tokens: list[int] = []
        self._parents: list[int] = []
        # one column more than there are rows: what nobody owns is seen by nobody
        self._seen = torch.zeros(1, cache.keys.shape[2] + 1, dtype=torch.bool, device=stack.device)
        self._seen[:, :length] = True
        self._places = {length - 1: 0}  # the row an answer ended with -> its row of the mask
        cache.correction = None

    def grow(self, tokens: Sequence[int], tips: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """One token more for every branch in flight.

        `tips` [b] are the rows that the branches ended with, or `length - 1` for none. Returns
        logits [b, vocabulary] and the new tips.
        """
        count, device = len(tokens), self._stack.device
        rows = np.arange(self._row, self._row + count, dtype=np.int64)
        places = [self._places[tip] for tip in tips]
        self._seen = self._seen[torch.tensor(places, device=device)]
        self._seen[:, self._row : self._row + count].fill_diagonal_(True)
        self._cache.set_rows(rows)
        layouts = BranchLayouts(rows, device, self._cache, self._seen)
        positions = torch.full((count,), self._next_position, device=device)
        self._cache.place(self._row, positions)
        cos_sin = self._position.cos_sin(positions, self._stack.dtype)
        logits = self._stack.forward(tokens, cos_sin, self._cache, layouts)
        self._tokens += tokens
        self._parents += tips
        self._places = {int(row): place for place, row in enumerate(rows)}
        self._row += count
        self._next_position += 1
        return logits, rows.tolist()

    def keep(self, tip: int) -> list[int]:
        """The tokens of the branch that ends at `tip`; their rows now follow the prompt's."""
        path: list[int] = []
        while tip >= self._length:
            path.append(tip)
            tip = self._parents[tip - self._length]
        rows = np.asarray(path[::-1], dtype=np.int64)
        self._cache.keep(rows, behind=self._length)
        return [self._tokens[row - self._length] for row in rows]


class BranchLayouts(Layouts):
    """Rows see what `seen` [rows, capacity + 1] says, whatever comes before what."""

    def __init__(self, rows: Rows, device: torch.device, cache: WorkingCache, seen: Tensor) -> None:
        super().__init__(rows, device, cache.slots)
        self._seen = seen

    def places(self, layer: int) -> None:
        """None: a row sees its own answer's rows only."""

    @cached_property
    def in_order(self) -> Layout:
        stop = int(self._rows[-1]) + 1
        return (Block(0, len(self._rows), stop, self._seen[:, :stop]),)

    @cached_property
    def _apart(self) -> Layout:
        assert self._slots is not None
        first, stop = self._slots.seen(int(self._rows[-1]))
        owners = torch.from_numpy(self._slots.owners(first, stop)).to(self._device)
        mask = self._seen.index_select(1, owners)
        return (Block(0, len(self._rows), stop, mask, first=first),)
