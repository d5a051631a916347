"""The SSD tier: extents, their index, and who still needs which block.

In: blocks to write, contexts to commit or to forget. Out: places on SSD, pages, contexts that were
committed. Nothing is overwritten: what changed is written elsewhere, and an extent goes when no
committed context and no block in the store's hands needs a place in it.

    STORE/rank-0/lock  index.sqlite  extents/000000000001.pages ...
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path

from cacheslide_agents.errors import PageError, StoreError
from cacheslide_agents.pages.block import Place
from cacheslide_agents.pages.extents import Extents, Page
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.index import Index
from cacheslide_agents.pages.lock import FolderLock
from cacheslide_agents.pages.needs import Needs
from cacheslide_agents.pages.rows import ContextRow, ExtentRow
from cacheslide_agents.pages.trouble import FULL
from cacheslide_agents.paths import expanded

log = logging.getLogger(__name__)


def rank_folder(path: Path, rank: int) -> Path:
    return path / f"rank-{rank}"


class Disk:
    """One store folder on SSD; not thread-safe but for `write` and `read`."""

    def __init__(
        self, path: str | PathLike[str], *, rank: int = 0, read_only: bool = False
    ) -> None:
        self.folder = rank_folder(expanded(path, "path"), rank)
        self.read_only = read_only
        self._extents = Extents(self.folder / "extents")
        self._lock = None if read_only else self._prepare()
        with ExitStack() as undo:
            undo.callback(self._unlock)
            self._index = Index(self.folder, read_only=read_only)
            undo.callback(self._index.close)
            self._take_stock()
            undo.pop_all()

    def _take_stock(self) -> None:
        """Read the index, and clean up as far as the disk allows."""
        self.needs = Needs()
        self._places: dict[int, tuple[Place, ...]] = {}
        self._forgotten: set[int] = set()
        self._pending: dict[int, ExtentRow] = {}
        self.spared: set[int] = set()
        """Extents that contexts may need which could not be looked at; they stay."""
        self._table = {row.number: row for row in self._index.extents()}
        self.nbytes = sum(extent.nbytes for extent in self._table.values())
        """Of all extents, dead places included."""
        self.missing = 0
        self.written_bytes = 0
        self._under_way: dict[int, int] = {}
        self.contexts = [row for row in self._index.contexts() if self._is_whole(row)]
        known = {*self._table, *self._files()}
        if not self._index.whole:
            self.spared |= known
        self._next = max({0, *known}) + 1
        for row in self.contexts:
            self._keep(row)
        if not self.read_only:
            try:
                self._sweep()
            except OSError as error:
                log.warning("%s: not cleaned up: %s", self.folder, error)

    def _files(self) -> set[int]:
        try:
            return self._extents.numbers()
        except OSError as error:
            log.warning("%s cannot be listed: %s", self._extents.folder, error)
            return set()

    def _prepare(self) -> FolderLock:
        try:
            for folder in (self.folder, self._extents.folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FolderLock(self.folder)
        except OSError as error:
            mend = "make room on the disk" if error.errno in FULL else "make the folder writable"
            raise StoreError(
                f"the page store in {self.folder} cannot be written: {error.strerror}; {mend}, use "
                "another one, or open it with read_only=True"
            ) from error

    def _is_whole(self, row: ContextRow) -> bool:
        """Whether all its blocks lie where the index says, in files as long as they must be. Where
        that cannot be seen, the context is left out, and stays on SSD for another opening.
        """
        numbers = {place.extent for place in row.places}
        try:
            lost = [number for number in numbers if not self._is_there(number)]
            why = f"extent {lost[0]} is missing or truncated" if lost else ""
        except OSError as error:
            self.spared |= numbers
            lost, why = [], str(error)
        if not why:
            return True
        self.missing += 1
        log.warning("%s: a context of %d tokens is lost: %s", self.folder, len(row.context), why)
        if lost and self._index.whole:
            self._forgotten.add(row.row or 0)
        return False

    def _is_there(self, number: int) -> bool:
        size, extent = self._extents.size(number), self._table.get(number)
        return extent is not None and size == extent.nbytes

    def _sweep(self) -> None:
        """Remove what a crash left: files the index does not know, extents nobody needs."""
        for number in self._extents.numbers() - set(self._table) - self.spared:
            self._extents.remove(number)
        self.commit()

    @property
    def damaged(self) -> int:
        return self._index.damaged

    @property
    def dead_bytes(self) -> int:
        """Of places that nobody needs in extents that somebody does."""
        return sum(
            (extent.blocks - self.needs.count(number)) * extent.geometry.block_bytes
            for number, extent in self._table.items()
        )

    @property
    def under_way(self) -> int:
        """Bytes of extents begun that were neither adopted nor given up."""
        return sum(self._under_way.values())

    @property
    def extents(self) -> dict[int, tuple[Geometry, int, int]]:
        """By number: geometry, blocks, and how many of them are needed."""
        return {
            number: (extent.geometry, extent.blocks, self.needs.count(number))
            for number, extent in self._table.items()
        }

    def begin(self, nbytes: int) -> int:
        """The number of an extent to be written; its bytes are under way from now on."""
        number, self._next = self._next, self._next + 1
        self._under_way[number] = nbytes
        return number

    def write(self, number: int, geometry: Geometry, blocks: Sequence[Sequence[Page]]) -> ExtentRow:
        """Write and sync an extent that was begun. `OSError` leaves no file."""
        assert self._lock is not None
        self._lock.check(self.folder)
        return ExtentRow(number, geometry, self._extents.write(number, geometry, blocks))

    def give_up(self, number: int) -> None:
        """What was begun is not to be; safe to call for what was adopted."""
        self._under_way.pop(number, None)

    def adopt(self, extent: ExtentRow) -> list[Place]:
        """Take a written extent in, to be committed next; its places are needed by the caller."""
        self.give_up(extent.number)
        self._table[extent.number] = self._pending[extent.number] = extent
        self.nbytes += extent.nbytes
        self.written_bytes += extent.nbytes
        places = [Place(extent.number, position) for position in range(extent.blocks)]
        for place in places:
            self.needs.hold(place)
        return places

    def read(self, places: Sequence[Place], layer: int, into: Sequence[Page]) -> None:
        """Pages of one layer, verified. `PageError` names the extent that is not as written;
        `OSError` when this process is short of files or memory.
        """
        by_extent: dict[int, list[tuple[int, Page]]] = {}
        for place, page in zip(places, into, strict=True):
            by_extent.setdefault(place.extent, []).append((place.position, page))
        for number, wanted in by_extent.items():
            extent = self._table.get(number)
            if extent is None:
                raise PageError(f"extent {number} of {self.folder} is gone")
            wanted.sort(key=lambda pair: pair[0])
            positions = [position for position, _ in wanted]
            pages = [page for _, page in wanted]
            self._extents.read(number, extent.geometry, extent.sums, layer, positions, pages)

    def may_go(self, number: int) -> bool:
        """Whether that extent goes as soon as nobody who is known needs it."""
        return number not in self.spared

    def forget(self, rows: Iterable[int]) -> None:
        """Rows of contexts that the next commit deletes."""
        self._forgotten.update(rows)

    def commit(self, contexts: Sequence[ContextRow] = ()) -> list[int]:
        """Make all of it hold after a crash; the contexts' rows. `OSError`: try again later.

        Extents that nobody needs any more go with it, first from the index, then their files.
        """
        forgotten = sorted(self._forgotten)
        for row in forgotten:
            for place in self._places.pop(row, ()):
                self.needs.release(place)
        needed_now = {place.extent for row in contexts for place in row.places}
        unneeded = [n for n in self._table if not self.needs.count(n) and n not in needed_now]
        dead = [number for number in unneeded if self.may_go(number)]
        fresh = [extent for number, extent in self._pending.items() if number not in dead]
        if not (fresh or contexts or forgotten or dead or self._index.unsound):
            return []
        assert self._lock is not None
        self._lock.check(self.folder)
        rows = self._index.commit(fresh, contexts, dead, forgotten)
        for context, made in zip(contexts, rows, strict=True):
            self._keep(context, made)
        self._forgotten.difference_update(forgotten)
        self._pending.clear()
        for number in dead:
            self.nbytes -= self._table.pop(number).nbytes
            self._extents.remove(number)
        return rows

    def _keep(self, row: ContextRow, number: int | None = None) -> None:
        number = row.row if number is None else number
        assert number is not None
        self._places[number] = row.places
        for place in row.places:
            self.needs.hold(place)

    def close(self) -> None:
        self._index.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
