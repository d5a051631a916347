"""Which contexts a store has, and which must go for its bounds to hold.

In: entries that come and go, pins. Out: entries by key, content or age.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

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
        self._weights: dict[StoredContext, int] = {}
        self._quotas = (
            Quota(limits.namespace_quota_bytes, lambda key: key.namespace),
            Quota(limits.tenant_quota_bytes, lambda key: key.tenant),
        )
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
        self._weights[entry.context] = entry.nbytes
        for quota in self._quotas:
            quota.count(key, entry.nbytes)

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
        weight = self._weights.pop(entry.context)
        for quota in self._quotas:
            quota.count(key, -weight)

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
        """Those that go so that `entry` fits the quotas of its namespace and its tenant, least
        recently used first; `None` if that cannot do."""
        key, leaving = entry.context.key, set(going)
        chosen: list[Entry] = []
        for quota in self._quotas:
            excess = quota.excess(key, entry.nbytes) - sum(
                self._weights[e.context] for e in (*leaving, *chosen) if quota.bounds(e, key)
            )
            for other in self.free() if excess > 0 else ():
                if excess <= 0:
                    break
                if quota.bounds(other, key) and other not in leaving and other not in chosen:
                    chosen.append(other)
                    excess -= self._weights[other.context]
            if excess > 0:
                return None
        return chosen

    def expired(self, now: float, among: Iterable[StoredContext] | None = None) -> list[Entry]:
        """Not used for `ttl_s`, of all or `among` some; `now` on the monotonic clock."""
        ttl = self._limits.ttl_s
        if ttl is None:
            return []
        asked = self._entries if among is None else [c for c in among if c in self._entries]
        entries = [self._entries[context] for context in asked]
        return [e for e in entries if now - e.last > ttl and not self.is_held(e)]


class Quota:
    """Most bytes that contexts of one group may weigh together; `None` is no limit."""

    def __init__(self, most: int | None, group: Callable[[ContextKey], str]) -> None:
        self._most, self._group = most, group
        self._held: Counter[str] = Counter()

    def count(self, key: ContextKey, nbytes: int) -> None:
        """Groups that hold nothing are forgotten: clients name as many as they like."""
        group = self._group(key)
        self._held[group] += nbytes
        if not self._held[group]:
            del self._held[group]

    def excess(self, key: ContextKey, nbytes: int) -> int:
        """Bytes that must go before `nbytes` more are within the limit."""
        return 0 if self._most is None else self._held[self._group(key)] + nbytes - self._most

    def bounds(self, entry: Entry, key: ContextKey) -> bool:
        """Whether `entry` is of the same group as `key`."""
        return self._group(entry.context.key) == self._group(key)


def _surplus(entries: Sequence[Entry], limit: int) -> Sequence[Entry]:
    """The first of `entries` that must go so that one more makes no more than `limit`."""
    return entries[: max(0, len(entries) - limit + 1)]
