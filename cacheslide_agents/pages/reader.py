"""One layer of a stored context, wherever its blocks lie.

In: an entry, a layer, tokens. Out: keys and values. What comes from SSD is verified, and stays in
memory if that costs no write. The slow part needs no lock: `begin` is called with the store's,
and holds the blocks, `finish` reads them and takes the lock when it lets go of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.arena import Arena
from cacheslide_agents.pages.base import LayerKV, TokenRange
from cacheslide_agents.pages.block import Block, Place
from cacheslide_agents.pages.entry import Entry
from cacheslide_agents.pages.eviction import Eviction
from cacheslide_agents.pages.extents import Page
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.room import Room

Ints = npt.NDArray[np.int64]


@dataclass
class Reading:
    """`blocks[i]` is needed by tokens `block_of == i`; `arrive` come from SSD into their slot,
    `pass_by` into staging memory."""

    arena: Arena
    layer: int
    blocks: list[Block]
    block_of: Ints
    row_of: Ints
    arrive: list[tuple[Block, Place]]
    pass_by: list[tuple[int, Place]]


class Reader:
    def __init__(
        self,
        holdings: Holdings,
        room: Room,
        eviction: Eviction,
        lock: AbstractContextManager[object],
    ) -> None:
        self._holdings, self._room, self._eviction = holdings, room, eviction
        self._lock = lock

    def begin(self, entry: Entry, layer: int, tokens: Ints | None, *, promote: bool) -> Reading:
        """All tokens, or these; with `promote` what is on SSD only gets a place in memory if there
        is room, for which others may run meanwhile.
        """
        blocks, block_of, row_of = _wanted(entry, tokens)
        arena = self._holdings.host.arena(entry.geometry)
        self._holdings.touch(entry, blocks)
        self._holdings.hold(blocks)
        if promote:
            self._promote(entry, blocks)
        reading = Reading(arena, layer, blocks, block_of, row_of, [], [])
        for at, block in enumerate(blocks):
            if block.slot is None:
                assert block.copy is not None
                reading.pass_by.append((at, block.copy))
            elif layer in block.absent:
                assert block.copy is not None
                reading.arrive.append((block, block.copy))
        return reading

    def _promote(self, entry: Entry, blocks: list[Block]) -> None:
        """Give `blocks`, which are held, places in memory, as many as there is room for."""
        entry.leases += 1  # making room drops contexts, and not this one
        try:
            self._make_room(sum(b.geometry.block_bytes for b in blocks if b.slot is None))
        except BaseException:
            self._holdings.unhold(blocks)
            raise
        finally:
            entry.leases -= 1
        host = self._holdings.host
        for block in blocks:
            if block.slot is None:
                if not host.fits(block.geometry.block_bytes):
                    return
                host.take(block)
                block.absent = set(range(block.geometry.layers))
                self._holdings.counts["promoted_blocks"] += 1

    def _make_room(self, nbytes: int) -> None:
        if self._eviction.writes_to_read and self._room.can_write:
            self._room.make(min(nbytes, self._holdings.host.budget_bytes))
        else:
            self._room.shed_clean(nbytes)

    def finish(self, reading: Reading) -> LayerKV:
        """`PageError` when a page on SSD is not what was written; its contexts are lost then."""
        sound = False
        try:
            pair = self._read(reading)
            sound = True
        except PageError as error:
            with self._lock:
                self._holdings.lose(reading.blocks, error)
            raise
        finally:
            with self._lock:
                self._end(reading, sound=sound)
        return pair

    def _read(self, reading: Reading) -> LayerKV:
        layer, arena = reading.layer, reading.arena
        slots = np.array([_slot(block, -1) for block in reading.blocks], dtype=np.int64)
        pages = [arena.page(_slot(block), layer) for block, _ in reading.arrive]
        places = [place for _, place in reading.arrive]
        if not reading.pass_by:
            self._read_ssd(places, layer, pages)
            both = arena.read(slots[reading.block_of], reading.row_of, layer)
            return both[0], both[1]
        staging = Arena.staging(arena.geometry, len(reading.pass_by), layers=1)
        pages += [staging.page(at, 0) for at in range(len(reading.pass_by))]
        self._read_ssd([*places, *(place for _, place in reading.pass_by)], layer, pages)
        staged = np.full(len(slots), -1)
        staged[[at for at, _ in reading.pass_by]] = np.arange(len(reading.pass_by))
        return _gather(staging, slots[reading.block_of], staged[reading.block_of], reading)

    def _read_ssd(self, places: list[Place], layer: int, pages: list[Page]) -> None:
        if places:
            assert self._holdings.disk is not None
            self._holdings.disk.read(places, layer, pages)

    def _end(self, reading: Reading, *, sound: bool) -> None:
        if sound:
            for block, _ in reading.arrive:
                block.absent.discard(reading.layer)
            page_bytes, counts = reading.arena.geometry.page_bytes, self._holdings.counts
            from_ssd = len(reading.arrive) + len(reading.pass_by)
            counts["ssd_read_bytes"] += from_ssd * page_bytes
            counts["memory_read_bytes"] += (len(reading.blocks) - from_ssd) * page_bytes
        self._holdings.unhold(reading.blocks)


def tokens_of(ranges: Sequence[TokenRange], context: int) -> Ints:
    """The tokens of `ranges`, one range after the other, of a context of that many tokens."""
    for start, stop in ranges:
        if not 0 <= start <= stop <= context:
            raise PageError(f"tokens {start} to {stop} are not in a context of {context} tokens")
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(np.arange(start, stop) for start, stop in ranges)])


def _gather(staging: Arena, slots: Ints, staged: Ints, reading: Reading) -> LayerKV:
    arena, rows, layer = reading.arena, reading.row_of, reading.layer
    passing = np.flatnonzero(staged >= 0)
    parts: list[tuple[Ints, Tensor]] = [(passing, staging.read(staged[passing], rows[passing], 0))]
    resident = np.flatnonzero(staged < 0)
    if len(resident):
        parts.append((resident, arena.read(slots[resident], rows[resident], layer)))
    both = torch.empty(
        (2, arena.geometry.kv_heads, len(rows), arena.geometry.head_dim),
        dtype=arena.geometry.torch_dtype,
        pin_memory=arena.pinned,
    )
    for tokens, part in parts:
        both.index_copy_(2, torch.from_numpy(tokens), part)
    return both[0], both[1]


def _wanted(entry: Entry, tokens: Ints | None) -> tuple[list[Block], Ints, Ints]:
    """The blocks that hold `tokens`; by token, which of them, and the row in it."""
    if tokens is None:
        return list(entry.blocks), entry.block_of.copy(), entry.row_of.copy()
    block_of = entry.block_of[tokens]
    needed = np.zeros(len(entry.blocks), dtype=np.bool_)
    needed[block_of] = True
    blocks = [entry.blocks[at] for at in np.flatnonzero(needed)]
    return blocks, (np.cumsum(needed) - 1)[block_of], entry.row_of[tokens]


def _slot(block: Block, absent: int | None = None) -> int:
    slot = block.slot if block.slot is not None else absent
    assert slot is not None
    return slot
