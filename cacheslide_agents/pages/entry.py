"""One stored context: which row of which block each of its tokens is.

In: a context and its blocks. Out: the same with what the store keeps of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.block import Block, State
from cacheslide_agents.pages.geometry import Geometry

Ints = npt.NDArray[np.int64]
Content = tuple[ContextKey, bool, bytes]
"""What makes two contexts copies of each other: key, isolated or not, token ids."""


@dataclass(eq=False)
class Entry:
    """Token i is row `row_of[i]` of `blocks[block_of[i]]`; several entries may share a block.

    `arrived` and `used` are on the store's clock, `last` is `used` on the monotonic one. `row`: its
    row in the index on SSD, if any; `replaces`: those of contexts it superseded, kept until then.
    """

    context: StoredContext
    geometry: Geometry
    blocks: list[Block]
    block_of: Ints
    row_of: Ints
    residuals: Mapping[int, Tensor] = field(default_factory=dict)
    arrived: int = 0
    used: int = 0
    last: float = 0.0
    leases: int = 0
    row: int | None = None
    replaces: set[int] = field(default_factory=set)

    @property
    def content(self) -> Content:
        return content_of(self.context.key, self.context.isolated, self.context.ids)

    @property
    def nbytes(self) -> int:
        """What it would weigh alone: all its blocks, whoever shares them."""
        return len(self.blocks) * self.geometry.block_bytes + self.residual_bytes

    @property
    def residual_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.residuals.values())

    @property
    def saved(self) -> bool:
        """Whether all its blocks have a valid copy on SSD."""
        return all(block.state is State.CLEAN for block in self.blocks)

    def own(self) -> None:
        for block in self.blocks:
            block.owners.add(self)

    def redirect(self, block: Block, moves: Mapping[int, tuple[Block, int]]) -> None:
        """Rows of `block` (keys of `moves`) now lie elsewhere: the block and the row there."""
        here = self.blocks.index(block)
        mine = np.flatnonzero(self.block_of == here)
        for token in mine[np.isin(self.row_of[mine], list(moves))]:
            target, row = moves[int(self.row_of[token])]
            if self not in target.owners:
                target.owners.add(self)
                self.blocks.append(target)
            self.block_of[token] = self.blocks.index(target)
            self.row_of[token] = row

    def shed(self) -> list[Block]:
        """Stop owning blocks that hold none of its tokens; which."""
        kept, renumbered = np.unique(self.block_of, return_inverse=True)
        if len(kept) == len(self.blocks):
            return []
        gone = [block for at, block in enumerate(self.blocks) if at not in set(kept.tolist())]
        for block in gone:
            block.owners.discard(self)
        self.blocks = [self.blocks[at] for at in kept]
        self.block_of = renumbered.astype(np.int64).reshape(-1)
        return gone


def content_of(key: ContextKey, isolated: bool, ids: npt.NDArray[np.int64]) -> Content:
    return (key, isolated, np.asarray(ids, dtype=np.int64).tobytes())
