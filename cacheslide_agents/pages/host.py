"""The host memory tier: arenas under one byte budget.

In: blocks that come and go. Out: where they lie, and what they weigh together.
"""

from __future__ import annotations

from cacheslide_agents.pages.arena import Arena
from cacheslide_agents.pages.block import Block
from cacheslide_agents.pages.geometry import Geometry


class Host:
    """`blocks` are those in memory, in order of arrival. `other_bytes` counts what lies elsewhere
    in memory on the store's account (residual checkpoints).
    """

    def __init__(self, budget_bytes: int, *, pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self.blocks: dict[Block, None] = {}
        self.other_bytes = 0
        self._pinned = pinned
        self._arenas: dict[Geometry, Arena] = {}
        self._block_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._block_bytes + self.other_bytes

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.budget_bytes

    def arena(self, geometry: Geometry) -> Arena:
        if geometry not in self._arenas:
            capacity = max(1, self.budget_bytes // geometry.block_bytes)
            self._arenas[geometry] = Arena(geometry, capacity, pinned=self._pinned)
        return self._arenas[geometry]

    def take(self, block: Block) -> None:
        """Give `block` a place; the caller has made room."""
        block.slot = self.arena(block.geometry).take()
        self.blocks[block] = None
        self._block_bytes += block.geometry.block_bytes

    def give(self, block: Block) -> None:
        """Take its place away."""
        assert block.slot is not None and not block.busy
        self.arena(block.geometry).give(block.slot)
        block.slot = None
        block.absent.clear()
        del self.blocks[block]
        self._block_bytes -= block.geometry.block_bytes
