"""All that a store has in its hands: both tiers, the catalog, the counters.

In: entries to take in and to drop, blocks to hold and to let go. Out: memory and places on SSD are
given back exactly when the last who needs them is gone. Callers hold the store's lock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from time import monotonic, time
from weakref import WeakKeyDictionary

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.base import StoredContext
from cacheslide_agents.pages.block import Block, Place
from cacheslide_agents.pages.catalog import Catalog
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.host import Host

log = logging.getLogger(__name__)


class Holdings:
    def __init__(self, host: Host, disk: Disk | None, catalog: Catalog) -> None:
        self.host, self.disk, self.catalog = host, disk, catalog
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"stall": 0.0}
        self.uncommitted: dict[Entry, None] = {}
        self.gone: WeakKeyDictionary[StoredContext, str] = WeakKeyDictionary()
        self._clock = 0
        if disk is not None:
            self._take_over(disk)

    def add(self, entry: Entry) -> None:
        entry.own()
        self.catalog.add(entry)
        self.host.other_bytes += entry.residual_bytes
        if entry.row is None:
            self.uncommitted[entry] = None
        self._clock = max(self._clock, entry.arrived)
        self.touch(entry, entry.blocks)
        entry.arrived = entry.arrived or entry.used

    def _take_over(self, disk: Disk) -> None:
        """What was committed before. A clock that went back makes nothing older than it is."""
        blocks: dict[Place, Block] = {}
        for row in disk.contexts:
            for place in row.places:
                if place not in blocks:
                    blocks[place] = Block(row.geometry, copy=place)
                    disk.needs.hold(place)
            mine = [blocks[place] for place in row.places]
            entry = Entry(row.context, row.geometry, mine, row.block_of, row.row_of)
            entry.arrived, entry.row = row.arrived, row.row
            self.add(entry)
            entry.last = monotonic() - max(0.0, time() - row.context.created)

    def touch(self, entry: Entry, blocks: Iterable[Block]) -> None:
        """They are used now."""
        self._clock += 1
        entry.used, entry.last = self._clock, monotonic()
        for block in blocks:
            block.used = entry.used

    def entry(self, context: StoredContext, layer: int = 0) -> Entry:
        """`PageError`, and a counted miss, when there is no such context or layer."""
        entry = self.catalog.get(context)
        what = f"a context of {len(context)} tokens of task {context.key.task!r}"
        if entry is None:
            reason = self.gone.get(context, "unknown")
            self.counts[f"misses_{reason}"] += 1
            raise PageError(
                f"{what} is no longer stored ({reason}); raise the store's budget of "
                f"{self.host.budget_bytes} bytes, or pin its session"
            )
        if not 0 <= layer < entry.geometry.layers:
            self.counts["misses_no_layer"] += 1
            raise PageError(
                f"{what} has no layer {layer}: it was stored with {entry.geometry.layers} layers"
            )
        return entry

    def expire(self, among: Iterable[StoredContext] | None = None) -> None:
        """Drop what was not used for too long, of all or `among` some."""
        for entry in self.catalog.expired(monotonic(), among):
            self.drop(entry, "expired")

    def lose(self, blocks: Iterable[Block], error: PageError) -> None:
        """Contexts whose pages are not as they were written are never asked again."""
        log.warning("stored contexts are lost: %s", error)
        self.counts["misses_torn"] += 1
        for entry in {owner for block in blocks for owner in block.owners}:
            if self.catalog.get(entry.context) is entry:  # and not on its way in
                self.drop(entry, "torn")

    def drop(self, entry: Entry, reason: str, heir: Entry | None = None) -> None:
        """Take `entry` out. What is on SSD of it and of those it replaced stays until `heir` is
        there, so that a crash in between leaves one of them.
        """
        self.catalog.remove(entry)
        self.uncommitted.pop(entry, None)
        self.host.other_bytes -= entry.residual_bytes
        rows = entry.replaces | ({entry.row} if entry.row is not None else set())
        if heir is not None:
            heir.replaces |= rows
        elif self.disk is not None:
            self.disk.forget(rows)
        for block in entry.blocks:
            block.owners.discard(entry)
            self.let_go(block)
        self.counts[reason] += 1
        self.gone[entry.context] = reason

    def abandon(self, entry: Entry) -> None:
        """Take back what was begun for an `entry` that does not come in."""
        for block in entry.blocks:
            block.owners.discard(entry)
        if self.disk is not None:
            self.disk.forget(entry.replaces)
        for block in entry.blocks:
            self.let_go(block)

    def let_go(self, block: Block) -> None:
        """Free what `block` has if nobody needs it."""
        if block.owners or block.busy:
            return
        if block.slot is not None:
            self.host.give(block)
        if block.copy is not None and self.disk is not None:
            self.disk.needs.release(block.copy)
            block.copy = None

    def hold(self, blocks: Iterable[Block]) -> None:
        """Readers or writers are at work on them."""
        for block in blocks:
            block.busy += 1

    def unhold(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.busy -= 1
            self.let_go(block)
