"""One writer per store folder.

In: a folder. Out: a lock that the kernel lets go of when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cacheslide_agents.errors import StoreError


class FolderLock:
    """Held from its making until `release`. `StoreError` when another holds it, or none can be."""

    def __init__(self, folder: Path) -> None:
        self._owner = os.getpid()
        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(folder)
            os.ftruncate(self._file, 0)
            os.write(self._file, str(self._owner).encode())
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, folder: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._file, 20).decode("ascii", "replace").strip() or "unknown"
            raise StoreError(
                f"the page store in {folder} is being written by process {holder}; end that one, "
                "use another folder or rank, or open it with read_only=True"
            ) from error
        except OSError as error:
            raise StoreError(
                f"{folder / 'lock'} cannot be locked: {error.strerror}; the file system there "
                "cannot keep a second writer out, use a folder on a local disk, or open the page "
                "store with read_only=True"
            ) from error

    def check(self, folder: Path) -> None:
        """`StoreError` in a forked child, which would write beside its parent."""
        if os.getpid() != self._owner:
            raise StoreError(
                f"the page store in {folder} was opened by process {self._owner}, which forked; "
                "open it in the process that uses it"
            )

    def release(self) -> None:
        os.close(self._file)
