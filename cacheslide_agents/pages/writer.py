"""A thread that writes ahead, so that a request seldom waits for a write.

In: a store that is short of memory it could free at once. Out: blocks on SSD, next to leave first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Thread, current_thread

from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.room import Room
from cacheslide_agents.pages.spill import MOST_BLOCKS, Spiller

log = logging.getLogger(__name__)
RESERVE = 1 / 16
"""Share of the memory budget kept free or clean: enough for a turn's new tokens, and so small that
hardly anything is written that would have been corrected again before it had to leave."""


class Writer:
    """One extent at a time. `changed` is the store's condition, notified after every put."""

    def __init__(
        self, holdings: Holdings, room: Room, spiller: Spiller, changed: Condition
    ) -> None:
        self._holdings, self._room, self._spiller = holdings, room, spiller
        self._changed = changed
        self._stopping = False
        self.at_work = False
        self._thread = Thread(target=self._serve, name="cacheslide-writer", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Until the extent under way is done; false if there is none. With the lock."""
        if not self.at_work:
            return False
        self._changed.wait_for(lambda: not self.at_work)
        return True

    def stop(self, then: Callable[[], None]) -> None:
        """Do `then` when the extent under way is done and no other will be begun.

        The writer's own thread may be the one that collects who needed the store; it cannot wait
        for itself, so that another one does.
        """
        if current_thread() is self._thread:
            Thread(target=self.stop, args=(then,), name="cacheslide-closer").start()
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        then()

    def _serve(self) -> None:
        with self._changed:
            while not self._stopping:
                if not self._write_one():
                    self._changed.wait()

    def _write_one(self) -> bool:
        """With the lock, which is let go of while the bytes are written."""
        if self._spiller.failing or not self._is_short():
            return False
        blocks = self._room.unsaved_first(MOST_BLOCKS)
        if not blocks:
            return False
        spill = self._spiller.begin(blocks)
        self.at_work = True
        try:
            if self._room.make_on_disk(spill):
                self._changed.release()
                try:
                    self._spiller.write(spill)
                finally:
                    self._changed.acquire()
        except Exception:
            log.exception("writing ahead failed")
        finally:
            saved = self._spiller.end(spill)
            self.at_work = False
            self._changed.notify_all()
        return saved

    def _is_short(self) -> bool:
        host = self._holdings.host
        free = host.budget_bytes - host.used_bytes
        clean = sum(b.geometry.block_bytes for b in host.blocks if b.dirt == 0)
        return free + clean < RESERVE * host.budget_bytes
