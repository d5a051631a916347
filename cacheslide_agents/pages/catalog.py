"""Which contexts a store has, and which must go for its bounds to hold.

In: entries that come and go, pins. Out: entries by key, content or age.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.entry import Content, Entry, content_of
from cacheslide_agents.pages.limits import Limits


class Catalog:
    """All entries, in memory and on SSD, in order of arrival."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[StoredContext, Entry] = {}
        self._by_key: dict[ContextKey, dict[StoredContext, Entry]] = {}
        self._by_content: dict[Content, list[Entry]] = {}
        self._namespace_bytes: dict[str, int] = {}
        self.pins: set[tuple[str, str]] = set()

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, context: StoredContext) -> Entry | None:
        return self._entries.get(context)

    def add(self, entry: Entry) -> None:
        key = entry.context.key
        self._entries[entry.context] = entry
        self._by_key.setdefault(key, {})[entry.context] = entry
        self._by_content.setdefault(entry.content, []).append(entry)
        held = self._namespace_bytes.get(key.namespace, 0)
        self._namespace_bytes[key.namespace] = held + entry.nbytes

    def remove(self, entry: Entry) -> None:
        key = entry.context.key
        del self._entries[entry.context]
        del self._by_key[key][entry.context]
        if not self._by_key[key]:
            del self._by_key[key]
        copies = self._by_content[entry.content]
        copies.remove(entry)
        if not copies:
            del self._by_content[entry.content]
        self._namespace_bytes[key.namespace] -= entry.nbytes

    def find(self, key: ContextKey, session: str | None) -> list[StoredContext]:
        """In context, the session's own first, then newest first."""
        found = [c for c in reversed(self._by_key.get(key, {})) if not c.isolated]
        if session is not None:
            found.sort(key=lambda context: context.session != session)
        return found

    def find_isolated(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> StoredContext | None:
        copies = self._by_content.get(content_of(key, True, ids))
        return copies[-1].context if copies else None

    def is_pinned(self, entry: Entry) -> bool:
        context = entry.context
        return context.session is not None and (
            (context.key.namespace, context.session) in self.pins
        )

    def is_held(self, entry: Entry) -> bool:
        return entry.leases > 0 or self.is_pinned(entry)

    def free(self) -> list[Entry]:
        """Those that may be dropped, least recently used first."""
        free = [entry for entry in self._entries.values() if not self.is_held(entry)]
        return sorted(free, key=lambda entry: entry.used)

    def superseded_by(self, context: StoredContext) -> list[Entry]:
        """Those that must go for the bounds on copies to hold, whatever room there is: the least
        exact, then oldest, copy of a text, and the least recently used context of a session.
        """
        same = self._entries.get(context)
        content = content_of(context.key, context.isolated, context.ids)
        copies = [e for e in self._by_content.get(content, ()) if e is not same]
        copies.sort(key=lambda e: (self.is_pinned(e), int(e.context.exact.sum())))
        going = [*_surplus(copies, self._limits.copies_per_content), *([same] if same else [])]
        turns = [e for e in self._turns(context) if e not in going]
        turns.sort(key=lambda e: e.used)
        return [*going, *_surplus(turns, self._limits.copies_per_session)]

    def _turns(self, context: StoredContext) -> list[Entry]:
        """The other contexts of its named session and key, computed in context."""
        if context.session is None or context.isolated:
            return []
        same_key = self._by_key.get(context.key, {}).values()
        return [
            entry
            for entry in same_key
            if not entry.context.isolated and entry.context.session == context.session
        ]

    def over_quota(self, entry: Entry, going: Iterable[Entry]) -> list[Entry] | None:
        """Those that go so that `entry` fits its namespace's quota; `None` if that cannot do."""
        quota = self._limits.namespace_quota_bytes
        if quota is None:
            return []
        namespace, leaving = entry.context.key.namespace, set(going)
        held = self._namespace_bytes.get(namespace, 0) + entry.nbytes - quota
        held -= sum(e.nbytes for e in leaving if e.context.key.namespace == namespace)
        chosen: list[Entry] = []
        for other in self.free():
            if held <= 0:
                break
            if other.context.key.namespace == namespace and other not in leaving:
                chosen.append(other)
                held -= other.nbytes
        return chosen if held <= 0 else None

    def expired(self, now: float, among: Iterable[StoredContext] | None = None) -> list[Entry]:
        """Not used for `ttl_s`, of all or `among` some; `now` on the monotonic clock."""
        ttl = self._limits.ttl_s
        if ttl is None:
            return []
        asked = self._entries if among is None else [c for c in among if c in self._entries]
        entries = [self._entries[context] for context in asked]
        return [e for e in entries if now - e.last > ttl and not self.is_held(e)]


def _surplus(entries: Sequence[Entry], limit: int) -> Sequence[Entry]:
    """The first of `entries` that must go so that one more makes no more than `limit`."""
    return entries[: max(0, len(entries) - limit + 1)]
