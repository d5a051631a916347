"""Extents of which little is needed any more, written anew without the rest.

In: a store's holdings. Out: fewer bytes on SSD. Checksums are verified on the way; an extent with a
torn page is left as it is.
"""

from __future__ import annotations

import logging

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.arena import Arena
from cacheslide_agents.pages.block import Block, Place
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.holdings import Holdings
from cacheslide_agents.pages.spill import Spiller

log = logging.getLogger(__name__)


def compact(holdings: Holdings, spiller: Spiller, at_most_live: float) -> int:
    """Rewrite extents of which at most that share of the blocks is needed; bytes freed."""
    disk = holdings.disk
    assert disk is not None
    before = disk.nbytes
    at = {
        block.copy: block
        for entry in holdings.catalog.entries()
        for block in entry.blocks
        if block.copy is not None
    }
    for number, (_, blocks, live) in disk.extents.items():
        if 0 < live <= at_most_live * blocks and live < blocks:
            _move(holdings, spiller, disk, number, at)
    return before - disk.nbytes


def _move(
    holdings: Holdings, spiller: Spiller, disk: Disk, number: int, at: dict[Place, Block]
) -> None:
    geometry, _, _ = disk.extents[number]
    places = disk.needed_in(number)
    if any(place not in at or at[place].busy for place in places):
        return  # also needed by a context that was replaced, or in use
    staging = Arena.staging(geometry, len(places))
    pages = [
        [staging.page(slot, at) for at in range(geometry.layers)] for slot in range(len(places))
    ]
    try:
        for layer in range(geometry.layers):
            disk.read(places, layer, [block[layer] for block in pages])
        extent = disk.write(geometry, pages)
    except PageError as error:
        log.warning("not compacted: %s", error)
        return
    except OSError as error:
        log.warning("%s: extent %d not compacted: %s", disk.folder, number, error)
        return
    moved = [at[place] for place in places]
    owners = {owner for block in moved for owner in block.owners}
    for block, place in zip(moved, disk.adopt(extent), strict=True):
        assert block.copy is not None
        disk.release(block.copy)
        block.copy = place
        at[place] = block
    for owner in owners:
        if owner.row is not None:
            owner.replaces.add(owner.row)
            owner.row = None
            holdings.uncommitted[owner] = None
    spiller.commit()
