"""One layer of a stored context, wherever its blocks lie.

In: an entry, a layer, tokens. Out: keys and values. What comes from SSD is verified, and stays in
memory if that costs no write. The slow part runs without the store's lock: `begin` and `end` are
called with it, and hold the blocks in between.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    entry: Entry
    layer: int
    blocks: list[Block]
    block_of: Ints
    row_of: Ints
    arrive: list[tuple[Block, Place]]
    pass_by: list[tuple[int, Place]]


class Reader:
    def __init__(self, holdings: Holdings, room: Room, eviction: Eviction) -> None:
        self._holdings, self._room, self._eviction = holdings, room, eviction

    def begin(self, entry: Entry, layer: int, ranges: Sequence[TokenRange] | None) -> Reading:
        blocks, block_of, row_of = _wanted(entry, ranges)
        self._holdings.touch(entry, blocks)
        if layer == 0:  # where a request begins; asking again at every layer would cost more
            self._promote([block for block in blocks if block.slot is None])
        reading = Reading(entry, layer, blocks, block_of, row_of, [], [])
        for at, block in enumerate(blocks):
            if block.slot is None:
                assert block.copy is not None
                reading.pass_by.append((at, block.copy))
            elif layer in block.absent:
                assert block.copy is not None
                reading.arrive.append((block, block.copy))
        self._holdings.hold(blocks)
        return reading

    def _promote(self, blocks: list[Block]) -> None:
        """Give `blocks` places in memory, as many as there is room for."""
        host = self._holdings.host
        nbytes = sum(block.geometry.block_bytes for block in blocks)
        if not nbytes:
            return
        if self._eviction.writes_to_read and self._room.can_write:
            self._room.make(min(nbytes, host.budget_bytes), exempt=set(blocks))
        else:
            self._room.shed_clean(nbytes, set(blocks))
        for block in blocks:
            if not host.fits(block.geometry.block_bytes):
                return
            host.take(block)
            block.absent = set(range(block.geometry.layers))
            self._holdings.counts["promoted_blocks"] += 1

    def read(self, reading: Reading) -> LayerKV:
        """`PageError` when a page on SSD is not what was written."""
        layer, geometry = reading.layer, reading.entry.geometry
        arena = self._holdings.host.arena(geometry)
        slots = np.array([_slot(block, -1) for block in reading.blocks], dtype=np.int64)
        pages = [arena.page(_slot(block), layer) for block, _ in reading.arrive]
        places = [place for _, place in reading.arrive]
        if not reading.pass_by:
            self._read_ssd(places, layer, pages)
            both = arena.read(slots[reading.block_of], reading.row_of, layer)
            return both[0], both[1]
        staging = Arena.staging(geometry, len(reading.pass_by), layers=1)
        pages += [staging.page(at, 0) for at in range(len(reading.pass_by))]
        self._read_ssd([*places, *(place for _, place in reading.pass_by)], layer, pages)
        staged = np.full(len(slots), -1)
        staged[[at for at, _ in reading.pass_by]] = np.arange(len(reading.pass_by))
        return _gather(arena, staging, slots[reading.block_of], staged[reading.block_of], reading)

    def _read_ssd(self, places: list[Place], layer: int, pages: list[Page]) -> None:
        if places:
            assert self._holdings.disk is not None
            self._holdings.disk.read(places, layer, pages)

    def end(self, reading: Reading, *, sound: bool) -> None:
        if sound:
            for block, _ in reading.arrive:
                block.absent.discard(reading.layer)
            page_bytes, counts = reading.entry.geometry.page_bytes, self._holdings.counts
            from_ssd = len(reading.arrive) + len(reading.pass_by)
            counts["ssd_read_bytes"] += from_ssd * page_bytes
            counts["memory_read_bytes"] += (len(reading.blocks) - from_ssd) * page_bytes
        self._holdings.unhold(reading.blocks)


def _gather(arena: Arena, staging: Arena, slots: Ints, staged: Ints, reading: Reading) -> LayerKV:
    rows, layer = reading.row_of, reading.layer
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


def _wanted(entry: Entry, ranges: Sequence[TokenRange] | None) -> tuple[list[Block], Ints, Ints]:
    """The blocks that hold the tokens of `ranges`; by token, which of them, and the row in it."""
    if ranges is None:
        return list(entry.blocks), entry.block_of.copy(), entry.row_of.copy()
    for start, stop in ranges:
        if not 0 <= start <= stop <= len(entry.context):
            raise PageError(
                f"tokens {start} to {stop} are not in a context of {len(entry.context)} tokens"
            )
    none = np.zeros(0, dtype=np.int64)
    tokens = np.concatenate([none, *(np.arange(start, stop) for start, stop in ranges)])
    block_of = entry.block_of[tokens]
    needed = np.zeros(len(entry.blocks), dtype=np.bool_)
    needed[block_of] = True
    blocks = [entry.blocks[at] for at in np.flatnonzero(needed)]
    return blocks, (np.cumsum(needed) - 1)[block_of], entry.row_of[tokens]


def _slot(block: Block, absent: int | None = None) -> int:
    slot = block.slot if block.slot is not None else absent
    assert slot is not None
    return slot
