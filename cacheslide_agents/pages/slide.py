"""The page store: stored contexts in host memory and on SSD.

In: contexts with their keys and values. Out: contexts by key or by tokens, and their layers,
wherever they lie; after a restart, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from threading import Condition, RLock
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages.base import ContextKey, LayerKV, ReusedRun, StoredContext, TokenRange
from cacheslide_agents.pages.catalog import Catalog
from cacheslide_agents.pages.counters import Counters
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.eviction import Eviction, Slide
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.host import Host
from cacheslide_agents.pages.keeper import Keeper, Offer
from cacheslide_agents.pages.lease import Lease
from cacheslide_agents.pages.limits import GIB, Limits
from cacheslide_agents.pages.reader import Reader, tokens_of
from cacheslide_agents.pages.room import Room
from cacheslide_agents.pages.spill import Spiller
from cacheslide_agents.pages.upkeep import Upkeep
from cacheslide_agents.pages.writer import Writer


class SlideStore:
    """A `PageStore` of two tiers, host memory and SSD; safe to call from several threads.

    With `path` contexts outlive the process: what `flush` or `close` wrote, or what had to leave
    memory, is found again after a restart, or a crash. Without, memory is all there is and what
    does not fit is dropped. One process writes to a folder (and `rank`, for tensor parallelism) at
    a time; others may open it with `read_only=True` and see what was committed when they did.

    `copies_per_session=1` lets a session's next context correct the blocks of its last in place. Of
    pinned sessions and of what is leased nothing is dropped. `pin_memory` page-locks the memory, by
    default where CUDA is there. With `write_ahead` a thread writes what will have to leave next.
    Raises `RequestError` for limits that make no sense and `StoreError` when the folder is locked,
    cannot be written or has a newer format.
    """

    def __init__(
        self,
        budget_bytes: int,
        path: str | os.PathLike[str] | None = None,
        *,
        disk_bytes: int = 64 * GIB,
        eviction: Eviction | None = None,
        copies_per_content: int = 2,
        copies_per_session: int = 1,
        ttl_s: float | None = None,
        namespace_quota_bytes: int | None = None,
        tenant_quota_bytes: int | None = None,
        pin_memory: bool | None = None,
        write_ahead: bool = True,
        rank: int = 0,
        read_only: bool = False,
    ) -> None:
        bounds = (budget_bytes, disk_bytes, copies_per_content, copies_per_session, ttl_s)
        limits = Limits(*bounds, namespace_quota_bytes, tenant_quota_bytes)
        pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        disk = None if path is None else Disk(path, rank=rank, read_only=read_only)
        self._changed = Condition(RLock())
        self._eviction: Eviction = eviction or Slide()
        self._holdings = Holdings(Host(budget_bytes, pinned=pinned), disk, Catalog(limits))
        self._counters = Counters(self._holdings, limits)
        writable = None if read_only else disk
        spiller = Spiller(self._holdings, writable, self._eviction) if writable else None
        self._writer: Writer | None = None
        self._room = Room(self._holdings, self._eviction, spiller, disk_bytes, self._wait)
        self._reader = Reader(self._holdings, self._room, self._eviction, self._changed)
        self._keeper = Keeper(self._holdings, self._room, self._reader)
        self._upkeep = Upkeep(self._holdings, self._room, spiller)
        self._read_only, self._open = read_only, True
        if spiller is not None and write_ahead:
            self._writer = Writer(self._holdings, self._room, spiller, self._changed)

    def _wait(self) -> bool:
        """`Writer.wait`. Others run meanwhile, and may close the store."""
        waited = self._writer is not None and self._writer.wait()
        self._check_open()
        return waited

    def put(
        self,
        context: StoredContext,
        layers: Sequence[LayerKV],
        residuals: Mapping[int, Tensor] | None = None,
        reused: Sequence[ReusedRun] = (),
        lease: Lease | None = None,
    ) -> bool:
        """Store `context`; false, and counted, when it cannot fit, holds no token, a source of
        `reused` is gone, or the store is read-only. The tensors are copied.

        Residual checkpoints stay in memory and do not outlive the process. Raises `PageError` when
        a tensor does not hold the context's tokens, a run does not lie in its source, or a page of
        a source is not as it was written.
        """
        with self._changed:
            self._check_open()
            self._holdings.expire()
            offer = Offer(context, layers, dict(residuals or {}), tuple(reused), lease)
            entry = None if self._read_only else self._keeper.keep(offer)
            if entry is None:
                self._holdings.counts["refused"] += 1
                return False
            if self._room.can_write and self._eviction.write_through:
                self._room.spill([block for block in entry.blocks if block.dirt])
            self._changed.notify_all()
            return True

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]:
        with self._changed:
            self._holdings.expire()
            return self._holdings.catalog.find(key, session)

    def contexts(self) -> list[StoredContext]:
        """All there are, oldest first, whatever their key."""
        with self._changed:
            self._holdings.expire()
            return [entry.context for entry in self._holdings.catalog.entries()]

    def find_isolated(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> StoredContext | None:
        with self._changed:
            self._holdings.expire()
            return self._holdings.catalog.find_isolated(key, ids)

    def load(
        self, context: StoredContext, layer: int, ranges: Sequence[TokenRange] | None = None
    ) -> LayerKV:
        """A copy in host memory (page-locked if the store is): nothing the store holds."""
        with self._changed:
            self._check_open()
            self._holdings.expire([context])
            entry = self._holdings.entry(context, layer)
            tokens = None if ranges is None else tokens_of(ranges, len(context))
            # layer 0 is where a request begins; asking again at every layer would cost more
            reading = self._reader.begin(entry, layer, tokens, promote=layer == 0)
        pair = self._reader.finish(reading)
        with self._changed:
            self._holdings.counts["hits"] += 1
        return pair

    def in_memory(self, context: StoredContext) -> bool:
        """Whether no page of `context` would have to be read from SSD; false where it is gone."""
        with self._changed:
            entry = self._holdings.catalog.get(context)
            return entry is not None and all(block.whole for block in entry.blocks)

    def residual(self, context: StoredContext, layer: int) -> Tensor | None:
        """Hidden states after `layer`; `None` where none are stored, or no longer."""
        with self._changed:
            entry = self._holdings.catalog.get(context)
            return entry.residuals.get(layer) if entry else None

    def lease(self, contexts: Iterable[StoredContext]) -> Lease:
        leased = tuple(contexts)
        with self._changed:
            self._check_open()
            self._holdings.expire(leased)
            entries = [self._holdings.entry(context) for context in leased]
            for entry in entries:
                entry.leases += 1
        return Lease(leased, lambda _: self._end_lease(entries))

    def _end_lease(self, entries: Sequence[Entry]) -> None:
        with self._changed:
            for entry in entries:
                entry.leases -= 1

    def pin(self, session: str, namespace: str = "default") -> None:
        """Keep this session's contexts in the store, present and future, until `unpin`."""
        with self._changed:
            self._holdings.catalog.pins.add((namespace, session))

    def unpin(self, session: str, namespace: str = "default") -> None:
        with self._changed:
            self._holdings.catalog.pins.discard((namespace, session))

    def clear(self) -> None:
        """Forget every context as `remove` does, pinned ones too; pins and counters stay."""
        with self._changed:
            self._check_open()
            self._upkeep.clear()

    def remove(self, contexts: Iterable[StoredContext]) -> int:
        """Forget these, also on SSD if it may be written to, unless they are leased or gone; how
        many. `StoreError` when they may be there again at the next opening.
        """
        with self._changed:
            self._check_open()
            return self._upkeep.remove(contexts)

    def flush(self) -> None:
        """Write whatever has no copy on SSD, and commit it. `StoreError` when that fails."""
        with self._changed:
            self._wait()
            self._upkeep.flush()

    def gc(self) -> int:
        """Rewrite extents that hold what nobody needs; bytes freed on SSD. `StoreError` when some
        could not be."""
        with self._changed:
            self._wait()
            return self._upkeep.gc()

    def close(self) -> None:
        """Flush (trouble is only logged) and let go of everything; safe to call twice."""
        if self._writer is not None:
            self._writer.stop(self._end)
        else:
            self._end()

    def _end(self) -> None:
        with self._changed:
            if self._open:
                self._open = False
                self._upkeep.close()

    def metrics(self) -> Mapping[str, float]:
        with self._changed:
            return self._counters.metrics()

    def counts(self) -> Mapping[str, float]:
        """Those of `metrics` that are counted as it happens: cheap, however much is stored."""
        with self._changed:
            return self._counters.counts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError("this page store is closed; make a new one")
