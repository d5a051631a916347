"""Extents of which little is needed any more, written anew without the rest.

In: a store's holdings. Out: fewer bytes on SSD. Checksums are verified on the way; an extent with a
torn page is left as it is.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from cacheslide_agents.errors import PageError, StoreError
from cacheslide_agents.pages.arena import Arena
from cacheslide_agents.pages.block import Block, Place
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.extents import Page, extent_bytes
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.rows import ExtentRow
from cacheslide_agents.pages.spill import Spiller
from cacheslide_agents.pages.trouble import told

log = logging.getLogger(__name__)


class Compacted(NamedTuple):
    """`trouble`: why some extents could not be written anew, and what to do about it."""

    freed: int
    trouble: str


def compact_all(holdings: Holdings, spiller: Spiller) -> int:
    """Bytes freed on SSD. `StoreError` when it could not be done, or only in part."""
    disk = holdings.disk
    assert disk is not None
    before = disk.nbytes
    spiller.must_commit("nothing was compacted")
    done = compact(holdings, spiller, at_most_live=1.0)
    if done.trouble:
        raise StoreError(f"the page store in {disk.folder} is not all compacted: {done.trouble}")
    return before - disk.nbytes


def compact(holdings: Holdings, spiller: Spiller, at_most_live: float) -> Compacted:
    """Rewrite extents of which at most that share of the blocks is needed, until the index cannot
    be written.
    """
    disk = holdings.disk
    assert disk is not None
    before, trouble = disk.nbytes, ""
    at = {
        block.copy: block
        for entry in holdings.catalog.entries()
        for block in entry.blocks
        if block.copy is not None
    }
    for number, (_, blocks, live) in disk.extents.items():
        if 0 < live <= at_most_live * blocks and live < blocks and disk.may_go(number):
            try:
                _move(holdings, spiller, disk, number, at)
            except PageError as error:
                log.warning("not compacted: %s", error)
            except OSError as error:
                log.warning("%s: extent %d not compacted: %s", disk.folder, number, error)
                trouble = told(error)
            except StoreError as error:
                trouble = str(error)
                break
    return Compacted(before - disk.nbytes, trouble)


def _move(
    holdings: Holdings, spiller: Spiller, disk: Disk, number: int, at: dict[Place, Block]
) -> None:
    geometry, _, _ = disk.extents[number]
    places = disk.needs.within(number)
    if not all(place in at and _can_move(disk, place, at[place]) for place in places):
        return  # it would lie there twice, or it is in use
    staging = Arena.staging(geometry, len(places))
    pages = [
        [staging.page(slot, at) for at in range(geometry.layers)] for slot in range(len(places))
    ]
    for layer in range(geometry.layers):
        disk.read(places, layer, [block[layer] for block in pages])
    extent = _written(disk, geometry, pages)
    moved = [at[place] for place in places]
    owners = {owner for block in moved for owner in block.owners}
    for block, place in zip(moved, disk.adopt(extent), strict=True):
        assert block.copy is not None
        disk.needs.release(block.copy)
        block.copy = place
        at[place] = block
    for owner in owners:
        if owner.row is not None:
            owner.replaces.add(owner.row)
            owner.row = None
            holdings.uncommitted[owner] = None
    spiller.must_commit("what was compacted lies there twice")


def _can_move(disk: Disk, place: Place, block: Block) -> bool:
    """Whether nobody needs `place` any more once the contexts that own `block` are committed anew:
    not where one of them cannot be yet, or where a context that was replaced still stands there.
    """
    rows = sum(owner.row is not None for owner in block.owners)
    settled = all(owner.saved for owner in block.owners)
    return settled and not block.busy and disk.needs.times(place) == 1 + rows


def _written(disk: Disk, geometry: Geometry, pages: list[list[Page]]) -> ExtentRow:
    number = disk.begin(extent_bytes(geometry, len(pages)))
    try:
        return disk.write(number, geometry, pages)
    except BaseException:
        disk.give_up(number)
        raise
