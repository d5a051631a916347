"""What is done to a store's files on request: contexts removed, the unsaved written, places freed.

In: a store's holdings. Out: files that say the same as the store, or a `StoreError` with the cause.
Callers hold the store's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages.base import StoredContext
from cacheslide_agents.pages.compaction import compact_all
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.room import Room
from cacheslide_agents.pages.spill import Spiller

log = logging.getLogger(__name__)


class Upkeep:
    """Without a `spiller` nothing may be written, and only memory changes."""

    def __init__(self, holdings: Holdings, room: Room, spiller: Spiller | None) -> None:
        self._holdings, self._room, self._spiller = holdings, room, spiller

    def remove(self, contexts: Iterable[StoredContext]) -> int:
        """Those that are there and not leased; how many."""
        found = [self._holdings.catalog.get(context) for context in contexts]
        entries = [entry for entry in found if entry is not None and entry.leases == 0]
        for entry in entries:
            self._holdings.drop(entry, "cleared")
        if self._spiller is not None:
            self._spiller.must_commit("what was removed may be there again at the next opening")
        return len(entries)

    def clear(self) -> None:
        """All there are, leased ones too."""
        entries = self._holdings.catalog.entries()
        for entry in entries:
            entry.leases = 0
        self.remove(entry.context for entry in entries)

    def flush(self) -> None:
        """Write all that has no copy on SSD, and commit it."""
        if self._spiller is not None:
            dirty = [block for block in self._holdings.host.blocks if block.dirt]
            if not (self._room.spill(dirty) and self._spiller.commit()):
                raise self._spiller.refusal("its contexts are only in memory")

    def close(self) -> None:
        """Flush (trouble is only logged) and let go of the files."""
        try:
            self.flush()
        except StoreError as error:
            log.warning("closed unsaved: %s", error)
        finally:
            if self._holdings.disk is not None:
                self._holdings.disk.close()

    def gc(self) -> int:
        """Bytes freed on SSD."""
        return 0 if self._spiller is None else compact_all(self._holdings, self._spiller)
