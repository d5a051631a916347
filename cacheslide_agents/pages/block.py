"""One block: what a store moves between memory and SSD.

In: corrections, writes and loads. Out: its state, and how many of its tokens have no copy on SSD.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from cacheslide_agents.pages.base import PAGE_TOKENS
from cacheslide_agents.pages.geometry import Geometry

if TYPE_CHECKING:
    from cacheslide_agents.pages.entry import Entry


class State(Enum):
    UNSAVED = "unsaved"
    CLEAN = "clean"
    DIRTY = "dirty"


class Place(NamedTuple):
    """Where on SSD: the extent's number and the block's position in it."""

    extent: int
    position: int


@dataclass(eq=False, slots=True)
class Block:
    """`PAGE_TOKENS` tokens of all layers.

    `slot` is its place in the arena, `None` if it is on SSD only; `absent` are the layers that an
    unfinished promotion has not brought yet. `copy` is its place on SSD, without the rows in
    `corrected` (bits), which were corrected since. `busy` counts readers and writers at work, for
    whom it must stay where it is. `used` is on the store's clock.
    """

    geometry: Geometry
    slot: int | None = None
    copy: Place | None = None
    corrected: int = 0
    used: int = 0
    busy: int = 0
    owners: set[Entry] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)

    @property
    def state(self) -> State:
        if self.copy is None:
            return State.UNSAVED
        return State.DIRTY if self.corrected else State.CLEAN

    @property
    def dirt(self) -> int:
        """Tokens without a copy on SSD."""
        return PAGE_TOKENS if self.copy is None else self.corrected.bit_count()

    @property
    def whole(self) -> bool:
        """Whether all of it is in memory."""
        return self.slot is not None and not self.absent
