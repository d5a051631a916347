"""Room in memory and on SSD.

In: bytes that are needed. Out: whether they are there, after clean blocks were dropped, others
written, or contexts dropped. Callers hold the store's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

from cacheslide_agents.pages.block import Block
from cacheslide_agents.pages.compaction import compact
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.eviction import Eviction
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.spill import MOST_BLOCKS, Spill, Spiller

FULL = "disk_bytes leaves no room for it; raise disk_bytes"
NOTHING: frozenset[Block] = frozenset()


class Room:
    """`wait` waits until a write that is under way elsewhere has ended; false if none is."""

    def __init__(
        self,
        holdings: Holdings,
        eviction: Eviction,
        spiller: Spiller | None,
        disk_bytes: int,
        wait: Callable[[], bool],
    ) -> None:
        self._holdings, self._eviction, self._spiller = holdings, eviction, spiller
        self._disk_bytes, self._wait = disk_bytes, wait

    def make(
        self,
        nbytes: int,
        *,
        exempt: Collection[Block] = NOTHING,
        going: Collection[Entry] = (),
    ) -> bool:
        """Free `nbytes` of memory, counting what the entries `going` will free; blocks `exempt`
        stay. False, and without a disk nothing changed, when that cannot be.
        """
        host = self._holdings.host
        while not host.fits(needed := nbytes - self._freed_by(going)):
            if needed > host.budget_bytes:
                return False
            if self._spiller and (self._evict(needed, exempt) or self._waited()):
                continue
            if not self._drop_contexts(needed, going):
                return False
        return True

    @property
    def can_write(self) -> bool:
        return self._spiller is not None

    def _waited(self) -> bool:
        with self.stalled():
            return self._wait()

    def shed_clean(self, nbytes: int) -> None:
        """Drop clean blocks from memory until `nbytes` are free, or there are no more."""
        if self._holdings.host.fits(nbytes):
            return
        for block in self._candidates(NOTHING, held=False):
            if block.dirt == 0:
                self._holdings.host.give(block)
                self._holdings.counts["dropped_blocks"] += 1
                if self._holdings.host.fits(nbytes):
                    return

    def unsaved_first(self, most: int) -> list[Block]:
        """The next blocks that would have to be written, for one who writes ahead."""
        ordered = self._candidates(NOTHING, held=False)
        return [block for block in ordered if block.dirt and block.whole][:most]

    def spill(self, blocks: list[Block]) -> bool:
        """Write `blocks` while the caller waits: a stall, if there are any."""
        assert self._spiller is not None
        if not blocks:
            return True
        with self.stalled():
            while blocks:
                spill = self._spiller.begin(blocks[:MOST_BLOCKS])
                if not self.on_disk(spill):
                    return False
                done = set(spill.source)
                # making room on SSD may have dropped the context of those that are left
                blocks = [b for b in blocks if b not in done and b.slot is not None]
        return True

    def on_disk(self, spill: Spill) -> bool:
        assert self._spiller is not None
        try:
            if self.make_on_disk(spill):
                self._spiller.write(spill)
        finally:
            saved = self._spiller.end(spill)
        return saved

    @contextmanager
    def stalled(self) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self._holdings.counts["stalls"] += 1
            self._holdings.seconds["stall"] += perf_counter() - started

    def make_on_disk(self, spill: Spill) -> bool:
        """Make room for `spill` in the SSD budget: replaced contexts go first, then dead places by
        compaction, then the least recently used contexts; nothing goes for what never fits (beside
        another extent under way), or while the index cannot be written. When false, `spill` knows
        why.
        """
        disk = self._holdings.disk
        assert disk is not None and self._spiller is not None
        while disk.nbytes + disk.under_way > self._disk_bytes:
            if disk.under_way > self._disk_bytes:
                spill.trouble = FULL
                return False
            before = disk.nbytes
            self._forget_replaced()
            committed = self._spiller.commit()
            if disk.nbytes + disk.under_way <= self._disk_bytes:
                break
            if not committed and disk.nbytes >= before:
                spill.trouble = self._spiller.trouble
                return False
            if not (self._compacted(spill.nbytes) or self._drop_stored()):
                spill.trouble = FULL
                return False
        return True

    def _evict(self, needed: int, exempt: Collection[Block]) -> bool:
        """Take blocks out of memory, writing those that must be; whether anything was freed."""
        host = self._holdings.host
        for held in (False, True):
            for block in self._candidates(exempt, held=held):
                if block.slot is None:
                    continue  # making room on SSD for another one has dropped its context
                if block.dirt and not self._save(block, exempt, needed, held):
                    return False
                if block.slot is not None and not block.busy and not block.dirt:
                    host.give(block)
                    self._holdings.counts["dropped_blocks"] += 1
                if host.fits(needed):
                    return True
        return False

    def _save(self, block: Block, exempt: Collection[Block], needed: int, held: bool) -> bool:
        """Write `block` and those that would be next, as far as room is needed."""
        excess = self._holdings.host.used_bytes + needed - self._holdings.host.budget_bytes
        count = min(MOST_BLOCKS, max(1, -(-excess // block.geometry.block_bytes)))
        ordered = self._candidates(exempt, held=held)
        later = [b for b in ordered if b.dirt and b.whole and b is not block]
        return self.spill([block, *later[: count - 1]])

    def _candidates(self, exempt: Collection[Block], *, held: bool) -> list[Block]:
        """Blocks that may leave memory, first to go first; those of leased or pinned contexts are
        the `held` ones."""
        catalog = self._holdings.catalog
        free = [b for b in self._holdings.host.blocks if not b.busy and b not in exempt]
        holders = {e for e in catalog.entries() if catalog.is_held(e)}
        return list(self._eviction.order(b for b in free if held != b.owners.isdisjoint(holders)))

    def _freed_by(self, going: Collection[Entry]) -> int:
        leaving = set(going)
        return sum(
            block.geometry.block_bytes
            for block in {block for entry in leaving for block in entry.blocks}
            if block.slot is not None and not block.busy and block.owners <= leaving
        ) + sum(entry.residual_bytes for entry in leaving)

    def _drop_contexts(self, needed: int, going: Collection[Entry]) -> bool:
        """Drop the least recently used contexts until `needed` fits; nothing if it never would."""
        host, leaving = self._holdings.host, set(going)
        excess = host.used_bytes + needed - host.budget_bytes
        left = Counter(
            {block: len(block.owners - leaving) for block in host.blocks if not block.busy}
        )
        chosen: list[Entry] = []
        for entry in self._holdings.catalog.free():
            if excess <= 0:
                break
            if entry in leaving:
                continue
            chosen.append(entry)
            excess -= entry.residual_bytes
            for block in entry.blocks:
                if block in left:
                    left[block] -= 1
                    excess -= block.geometry.block_bytes if left[block] == 0 else 0
        if excess > 0:
            return False
        self._drop(chosen)
        return True

    def _drop(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._holdings.drop(entry, "evictions")

    def _forget_replaced(self) -> None:
        disk = self._holdings.disk
        assert disk is not None
        for entry in self._holdings.uncommitted:
            disk.forget(entry.replaces)
            entry.replaces = set()

    def _compacted(self, nbytes: int) -> bool:
        """Whether extents that are half dead, or more, gave anything back."""
        disk = self._holdings.disk
        assert disk is not None and self._spiller is not None
        if disk.dead_bytes < nbytes:
            return False
        return compact(self._holdings, self._spiller, at_most_live=0.5).freed > 0

    def _drop_stored(self) -> bool:
        """Drop the least recently used context that has something on SSD that may go with it."""
        disk = self._holdings.disk
        assert disk is not None
        for entry in self._holdings.catalog.free():
            if any(b.copy is not None and disk.may_go(b.copy.extent) for b in entry.blocks):
                self._drop([entry])
                return True
        return False
