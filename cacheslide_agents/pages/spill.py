"""Blocks from memory to SSD, many in one extent.

In: blocks without a valid copy. Out: the same, clean. Three steps, so that the slow one needs no
lock: `begin` (locked) says what will be written, in which extent, `write` writes and syncs it,
`end` (locked) makes it count and commits the contexts that are now whole on SSD.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages.block import Block
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.eviction import Eviction
from cacheslide_agents.pages.extents import Page, extent_bytes
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.packing import Packed, may_be_packed, pack
from cacheslide_agents.pages.rows import ContextRow, ExtentRow
from cacheslide_agents.pages.trouble import told

log = logging.getLogger(__name__)
MOST_BLOCKS = 64
"""Blocks in one extent: tens of megabytes for small models, where larger ones read no faster."""


@dataclass
class Spill:
    """One extent on its way. `source` are the blocks it saves, whole or by their packed rows."""

    number: int
    geometry: Geometry
    source: list[Block]
    whole: list[Block]
    packed: Packed
    pages: list[list[Page]]
    extent: ExtentRow | None = None
    trouble: str = "it was given up before anything was written; see the log"
    """Why there is no extent, and what to do about it."""

    @property
    def nbytes(self) -> int:
        return extent_bytes(self.geometry, len(self.pages))


class Spiller:
    def __init__(self, holdings: Holdings, disk: Disk, eviction: Eviction) -> None:
        self._holdings, self._disk, self._eviction = holdings, disk, eviction
        self.trouble = ""
        """Why the last write failed, and what to do about it; empty when it did not."""

    @property
    def failing(self) -> bool:
        return bool(self.trouble)

    def begin(self, blocks: Sequence[Block]) -> Spill:
        """Of `blocks`, all whole in memory, those of the first one's geometry; they are held.

        Who is at work on a block counts on its rows, so a busy one is written whole.
        """
        geometry = blocks[0].geometry
        source = sorted((b for b in blocks if b.geometry == geometry), key=_reading_order)
        few = [b for b in source if self._eviction.packs and may_be_packed(b)]
        whole = [b for b in source if b not in set(few)]
        arena = self._holdings.host.arena(geometry)
        packed = pack(few, arena)
        layers = range(geometry.layers)
        pages = [[arena.page(_slot(block), at) for at in layers] for block in whole]
        if packed.staging is not None:
            slots = range(len(packed.blocks))
            pages += [[packed.staging.page(slot, at) for at in layers] for slot in slots]
        self._holdings.hold(source)
        number = self._disk.begin(extent_bytes(geometry, len(pages)))
        return Spill(number, geometry, source, whole, packed, pages)

    def write(self, spill: Spill) -> None:
        """Trouble is logged; `end` then knows by the missing extent."""
        try:
            spill.extent = self._disk.write(spill.number, spill.geometry, spill.pages)
        except OSError as error:
            spill.trouble = told(error)
            log.warning("%s: blocks stay in memory, writing failed: %s", self._disk.folder, error)

    def end(self, spill: Spill) -> bool:
        """Whether the blocks are saved; they are no longer held."""
        self.trouble = spill.trouble if spill.extent is None else ""
        if spill.extent is not None:
            self._settle(spill, spill.extent)
        self._disk.give_up(spill.number)
        self._holdings.unhold(spill.source)
        for block in spill.packed.blocks:
            self._holdings.let_go(block)
        if spill.extent is None:
            self._holdings.counts["write_failures"] += 1
            return False
        self._holdings.counts["spilled_blocks"] += len(spill.source)
        self._holdings.counts["packed_blocks"] += len(spill.packed.moves)
        self.commit()
        return True

    def _settle(self, spill: Spill, extent: ExtentRow) -> None:
        saved = [*spill.whole, *spill.packed.blocks]
        for block, place in zip(saved, self._disk.adopt(extent), strict=True):
            if block.copy is not None:
                self._disk.needs.release(block.copy)
            block.copy, block.corrected = place, 0
        for block, moves in spill.packed.moves.items():
            for owner in list(block.owners):
                owner.redirect(block, moves)
                for shed in owner.shed():
                    self._holdings.let_go(shed)
            block.corrected = 0

    def commit(self) -> bool:
        """Write the rows of all contexts that are whole on SSD and have none; whether it went."""
        ready = [entry for entry in self._holdings.uncommitted if entry.saved]
        for entry in ready:
            self._disk.forget(entry.replaces)
        try:
            rows = self._disk.commit([row_of(entry) for entry in ready])
        except OSError as error:
            log.warning("%s: not committed, will be tried again: %s", self._disk.folder, error)
            self.trouble = told(error)
            self._holdings.counts["write_failures"] += 1
            return False
        for entry, row in zip(ready, rows, strict=True):
            entry.row, entry.replaces = row, set()
            self._holdings.uncommitted.pop(entry, None)
        return True

    def must_commit(self, otherwise: str) -> None:
        """`StoreError`, which says what follows, when it did not go; it will be tried again."""
        if not self.commit():
            raise self.refusal(otherwise)

    def refusal(self, otherwise: str) -> StoreError:
        return StoreError(
            f"the page store's files could not be written, {otherwise}: {self.trouble}"
        )


def _slot(block: Block) -> int:
    assert block.slot is not None, "a block that is not in memory cannot be written"
    return block.slot


def row_of(entry: Entry) -> ContextRow:
    places = tuple(block.copy for block in entry.blocks if block.copy is not None)
    assert len(places) == len(entry.blocks)
    return ContextRow(
        entry.context, entry.geometry, places, entry.block_of, entry.row_of, entry.arrived
    )


def _reading_order(block: Block) -> tuple[int, int]:
    """Blocks of one context side by side in its order, so that they are read in one go."""
    first = min(block.owners, key=lambda entry: entry.used, default=None)
    return (first.used, first.blocks.index(block)) if first else (0, 0)
