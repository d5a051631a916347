"""The folder that a run writes to: one run at a time, and nothing half written in it.

In: a folder, or the name of one to be made inside it. Out: a claim on it that leaves no file and
ends with the process, and folders that appear whole, by rename.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from cacheslide_agents.errors import DataError
from cacheslide_agents.training.checkpoint import GO_ON
from cacheslide_agents.weights.writing import writing

LEAST_ROOM = 1 << 30
"""Bytes for a checkpoint and a result."""


@contextmanager
def claimed(out: Path, room: int = 0) -> Iterator[None]:
    """`out`, made where it is missing, for this run alone while the block lasts.

    `DataError` if another run has it, if nothing can be written there, or if fewer than `room`
    bytes are free.
    """
    with writing(out, "choose another --out"):
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            free = shutil.disk_usage(out).free
    if free < room:
        raise DataError(
            f"{out}: {free >> 20} MB are free and {room >> 20} may be needed; free some space "
            "there, or choose another --out"
        )
    with writing(out, "choose another --out"):
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(folder, out)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, out: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(
            f"{out} is being written by another run; wait for its end, or choose another --out"
        ) from error
    except OSError as error:
        raise DataError(
            f"{out} cannot be locked ({error}); choose an --out on a local disk"
        ) from error


def check_free(folder: Path) -> None:
    """`DataError` where a result lies already, which nobody asked to replace."""
    if folder.exists():
        raise DataError(f"{folder} exists already; choose another --out, or remove it")


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A folder to fill. It takes the name `folder` once it is whole and on the disk.

    `DataError` where it cannot be written; what had been written is then removed.
    """
    draft = folder.with_name(f"{folder.name}.part")
    try:
        with writing(folder, GO_ON):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            yield draft
            _force_to_disk(draft)
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _force_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
