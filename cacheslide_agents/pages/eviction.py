"""Which blocks leave memory first, and when they are written to SSD.

In: the blocks that may leave. Out: the same, first to go first. `EVICTIONS` is the list of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages.block import Block


class Eviction(Protocol):
    """`write_through`: new and corrected blocks are written when they are put. `packs`: of a dirty
    block only the corrected rows are written, packed into new blocks, when they are few.
    `writes_to_read`: a block that is read may push one out that has to be written first.
    """

    @property
    def name(self) -> str: ...
    @property
    def write_through(self) -> bool: ...
    @property
    def packs(self) -> bool: ...
    @property
    def writes_to_read(self) -> bool: ...
    def order(self, blocks: Iterable[Block]) -> Sequence[Block]: ...


@dataclass(frozen=True)
class Slide:
    """CacheSlide, section 4: clean blocks first, by last use; the others by falling number of
    tokens that have no copy, so that a write saves as many as it can, then by last use.

    Departs from the paper in `packs` and in counting an unsaved block as corrected throughout.
    """

    packs: bool = True
    write_through: bool = False
    writes_to_read: bool = False
    name: str = "slide"

    def order(self, blocks: Iterable[Block]) -> Sequence[Block]:
        return sorted(blocks, key=lambda block: (block.dirt > 0, -block.dirt, block.used))


@dataclass(frozen=True)
class Lru:
    """The block least recently stored or loaded goes first, whether it must be written or not.

    With `write_through` (as in stores of the CacheBlend kind) or, without, write-back.
    """

    write_through: bool = False
    packs: bool = False
    writes_to_read: bool = True

    @property
    def name(self) -> str:
        return "lru_write_through" if self.write_through else "lru_write_back"

    def order(self, blocks: Iterable[Block]) -> Sequence[Block]:
        return sorted(blocks, key=lambda block: block.used)


EVICTIONS: tuple[Eviction, ...] = (Slide(), Lru(write_through=True), Lru())


def eviction_named(name: str) -> Eviction:
    """`RequestError` when there is none of that name."""
    for eviction in EVICTIONS:
        if eviction.name == name:
            return eviction
    known = ", ".join(eviction.name for eviction in EVICTIONS)
    raise RequestError(f"no eviction policy named {name!r}; known: {known}")
