"""The page store of a backend: one that was given, or one of its own.

In: a store, or where and how large to make one. Out: the store, closed in time if it is our own.
"""

from __future__ import annotations

import os
from weakref import finalize

from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages import MemoryStore, PageStore, SlideStore
from cacheslide_agents.paths import expanded


class Storage:
    """A store of its own ends with `close`, or at the latest when the process does.

    So a script that forgets to close its backend finds its contexts again. A store that was given
    stays open. Raises `RequestError` for a path beside a store, and what `SlideStore` raises.
    """

    def __init__(
        self,
        given: PageStore | None,
        nbytes: int,
        path: str | os.PathLike[str] | None,
        disk_bytes: int,
    ) -> None:
        if given is not None and path is not None:
            raise RequestError(
                f"store_path={os.fspath(path)!r} is for a store of the backend's own, and a store "
                "was given; give one of the two"
            )
        self._end: finalize[[PageStore, int], Storage] | None = None
        self.store = given if given is not None else _made(nbytes, path, disk_bytes)
        if given is None:
            self._end = finalize(self, _close, self.store, os.getpid())

    def close(self) -> None:
        """Safe to call twice."""
        if self._end is not None:
            self._end()


def _made(nbytes: int, path: str | os.PathLike[str] | None, disk_bytes: int) -> PageStore:
    if path is None:
        return MemoryStore(nbytes)
    return SlideStore(nbytes, expanded(path, "store_path"), disk_bytes=disk_bytes)


def _close(store: PageStore, owner: int) -> None:
    """A forked child leaves it to its parent."""
    if os.getpid() == owner:
        store.close()
