"""Whether everything on SSD is as it was written.

In: a store's SSD tier. Out: every page, extent and row that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.block import Place
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.extents import Page
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.trouble import told


@dataclass(frozen=True)
class Fault:
    """`layer` and `position` (block in its extent) where one page is meant."""

    what: str
    extent: int | None = None
    layer: int | None = None
    position: int | None = None


def audit(disk: Disk) -> Iterator[Fault]:
    """Reads every page that a context needs."""
    if disk.damaged:
        yield Fault(f"{disk.damaged} rows of the index are damaged; their contexts are lost")
    if disk.missing:
        yield Fault(
            f"{disk.missing} contexts are lost: their extents are missing, truncated or cannot be "
            "looked at"
        )
    for number, (geometry, _, _) in disk.extents.items():
        places = disk.needs.within(number)
        for layer in range(geometry.layers):
            try:
                disk.read(places, layer, _buffers(geometry, len(places)))
            except (PageError, OSError):
                yield from _single_pages(disk, geometry, places, layer)


def _single_pages(
    disk: Disk, geometry: Geometry, places: list[Place], layer: int
) -> Iterator[Fault]:
    for place in places:
        try:
            disk.read([place], layer, _buffers(geometry, 1))
        except PageError as error:
            yield Fault(str(error), place.extent, layer, place.position)
        except OSError as error:
            yield Fault(f"not looked at: {told(error)}", place.extent, layer, place.position)


def _buffers(geometry: Geometry, count: int) -> list[Page]:
    return list(np.empty((count, geometry.page_bytes), dtype=np.uint8))
