"""Files of pages: written once, synced, never changed.

In: pages in memory. Out: the same from SSD, with their checksums verified. An extent holds blocks
that left memory together, layer by layer, so that one layer of them is one sequential range:

    4,096 bytes, the head: JSON with magic, format version, number and geometry, padded with spaces
    layer 0: page of block 0, page of block 1, ...; layer 1: ...
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.trouble import SHORT

log = logging.getLogger(__name__)
MAGIC = "cacheslide extent"
FORMAT = 1
HEADER_BYTES = 4096
MOST_BUFFERS = 512  # of one vectored write or read; the kernel's limit is 1,024
SUFFIX = ".pages"
Page = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]
"""Checksums [layers, blocks]."""


def checksum(page: Page) -> int:
    """XXH3, 64 bits: here 7 times as fast as CRC-32, so that reading stays the disk's business."""
    import xxhash  # only files need it, and a store in memory needs none

    return xxhash.xxh3_64_intdigest(page.data)


def extent_bytes(geometry: Geometry, blocks: int) -> int:
    return HEADER_BYTES + blocks * geometry.block_bytes


class Extents:
    """The folder of extent files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        return self.folder / f"{number:012x}{SUFFIX}"

    def numbers(self) -> set[int]:
        """Of the files that are there."""
        names = [path.stem for path in self.folder.glob(f"*{SUFFIX}")]
        return {int(name, 16) for name in names if all(c in "0123456789abcdef" for c in name)}

    def size(self, number: int) -> int | None:
        """Bytes of a file; `None` where there is none, `OSError` where that cannot be seen."""
        try:
            return self.path(number).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, number: int, geometry: Geometry, blocks: Sequence[Sequence[Page]]) -> Sums:
        """Make the file and sync it and its folder; `blocks[b][layer]`. `OSError` leaves none."""
        sums = np.zeros((geometry.layers, len(blocks)), dtype=np.uint64)
        path = self.path(number)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(file, [_head(number, geometry, len(blocks))])
                for layer in range(geometry.layers):
                    pages = [block[layer] for block in blocks]
                    _write_all(file, pages)
                    sums[layer] = [checksum(page) for page in pages]
                os.fsync(file)
            finally:
                os.close(file)
            self._sync_folder()
        except BaseException:
            self.remove(number)
            raise
        return sums

    def read(
        self,
        number: int,
        geometry: Geometry,
        sums: Sums,
        layer: int,
        wanted: Sequence[int],
        into: Sequence[Page],
    ) -> None:
        """Pages of one layer at positions `wanted` (ascending) into as many buffers.

        Neighbours are read in one go. `PageError` when the file is gone, short, not what was
        written or cannot be read; `OSError` when this process is short of files or memory.
        """
        path = self.path(number)
        start = HEADER_BYTES + layer * sums.shape[1] * geometry.page_bytes
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for first, last in _neighbours(wanted):
                    place = start + wanted[first] * geometry.page_bytes
                    _read_all(file, into[first:last], place, path)
            finally:
                os.close(file)
        except OSError as error:
            raise _unreadable(path, error) from error
        for position, page in zip(wanted, into, strict=True):
            if checksum(page) != int(sums[layer, position]):
                torn = f"page {position} of layer {layer} does not have its checksum"
                head = _head(number, geometry, sums.shape[1])
                raise PageError(f"extent {path} is {_what_it_is(path, head)}: {torn}")

    def remove(self, number: int) -> None:
        """What cannot be removed now is in no index, and goes when the store is next opened."""
        try:
            self.path(number).unlink(missing_ok=True)
        except OSError as error:
            log.warning("extent %s cannot be removed: %s", self.path(number), error)

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _head(number: int, geometry: Geometry, blocks: int) -> Page:
    told = {"magic": MAGIC, "format": FORMAT, "number": number, "blocks": blocks}
    text = json.dumps({**told, "geometry": json.loads(geometry.to_json())})
    return np.frombuffer(text.encode().ljust(HEADER_BYTES), dtype=np.uint8)


def _what_it_is(path: Path, head: Page) -> str:
    """A file with a page that is not as it was written: damaged, or not the one that was meant."""
    try:
        with path.open("rb") as file:
            exchanged = file.read(HEADER_BYTES) != head.tobytes()
    except OSError:
        exchanged = False
    return "another file than was written there" if exchanged else "torn"


def _neighbours(wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Slices of `wanted` that lie side by side, `MOST_BUFFERS` long at most."""
    first = 0
    for at in range(1, len(wanted) + 1):
        if at == len(wanted) or wanted[at] != wanted[at - 1] + 1 or at - first == MOST_BUFFERS:
            yield first, at
            first = at


def _write_all(file: int, buffers: Sequence[Page]) -> None:
    for at in range(0, len(buffers), MOST_BUFFERS):
        left = [buffer.data for buffer in buffers[at : at + MOST_BUFFERS]]
        while left:
            left = _after(left, os.writev(file, left))


def _read_all(file: int, buffers: Sequence[Page], place: int, path: Path) -> None:
    left = [buffer.data for buffer in buffers]
    while left:
        got = os.preadv(file, left, place)
        if got == 0:
            raise PageError(f"extent {path} is truncated")
        place += got
        left = _after(left, got)


def _unreadable(path: Path, error: OSError) -> PageError | OSError:
    if error.errno in SHORT:
        return OSError(error.errno, error.strerror, str(path))
    if isinstance(error, FileNotFoundError):
        return PageError(f"extent {path} is missing")
    return PageError(
        f"extent {path} cannot be read: {error.strerror}; see that its disk is well and the file "
        "may be read"
    )


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` once their first `done` bytes went through."""
    at = 0
    while at < len(buffers) and done >= len(buffers[at]):
        done -= len(buffers[at])
        at += 1
    left = buffers[at:]
    if left and done:
        left[0] = left[0][done:]
    return left
