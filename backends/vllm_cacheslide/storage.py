"""One rank's page store: where it lies, and what it tells of itself.

In: settings, which rank of how many. Out: a store, in memory or with an SSD tier in a folder of the
rank's own; keys that no other rank's store has; what was moved since the last step, for metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from cacheslide_agents.pages.base import ContextKey
from cacheslide_agents.pages.counters import MISSES
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.eviction import eviction_named
from cacheslide_agents.pages.slide import SlideStore
from cacheslide_agents.paths import expanded
from vllm_cacheslide.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MEMORY_COPIES = 4
"""Contexts of a named session that are kept in memory alone, so that a turn can be taken back."""
_MOVED = {
    f"store_bytes:{tier}:{direction}": f"{tier}_{direction}_bytes"
    for tier in ("memory", "ssd")
    for direction in ("read", "write")
}
_COUNTED = {
    **_MOVED,
    **{f"misses:{reason}": f"misses_{reason}" for reason in MISSES},
    "store_failures:write": "write_failures",
}
_LEVELS = {f"stored_bytes:{tier}": f"{tier}_bytes" for tier in ("memory", "ssd")}
"""Our metrics, and what the store calls them."""


@dataclass(frozen=True)
class Rank:
    """A worker's part of the heads: `head_rank` of `size` tensor-parallel ranks; `number` counts
    the workers of all data-parallel replicas.
    """

    number: int
    head_rank: int
    size: int

    @classmethod
    def of(cls, config: VllmConfig, head_rank: int) -> Self:
        size = config.parallel_config.tensor_parallel_size
        return cls(config.parallel_config.data_parallel_index * size + head_rank, head_rank, size)

    def own(self, key: ContextKey) -> ContextKey:
        """The key under which this rank stores: folders that were exchanged hold nothing for it."""
        return replace(key, fingerprint=key.fingerprint + self._suffix)

    def common(self, key: ContextKey) -> ContextKey | None:
        """The inverse of `own`; `None` for a key of another rank, or of another size."""
        if not key.fingerprint.endswith(self._suffix):
            return None
        return replace(key, fingerprint=key.fingerprint.removesuffix(self._suffix))

    @property
    def _suffix(self) -> str:
        return f"-{self.head_rank}of{self.size}" if self.size > 1 else ""


def open_store(settings: Settings, rank: Rank) -> SlideStore:
    """`StoreError` when its folder is locked, cannot be written or has a newer format."""
    return SlideStore(
        settings.store_bytes,
        None if settings.store_path is None else _folder(settings.store_path),
        disk_bytes=settings.disk_bytes,
        eviction=eviction_named(settings.eviction),
        copies_per_session=1 if settings.one_per_session else MEMORY_COPIES,
        ttl_s=settings.ttl_s,
        namespace_quota_bytes=settings.namespace_quota_bytes,
        tenant_quota_bytes=settings.tenant_quota_bytes,
        rank=rank.number,
    )


def check_folder(settings: Settings) -> None:
    """Raises what `open_store` would of the first rank's folder: before a model is loaded, and in
    the caller's process. Another rank's ends the engine's start.
    """
    if settings.store_path is not None:
        Disk(_folder(settings.store_path)).close()


class StoreNews:
    """What a store counted since the last call, under our metrics' names."""

    def __init__(self, store: SlideStore) -> None:
        self._store = store
        self._last: Mapping[str, float] = {}

    def take(self) -> dict[str, float]:
        """Sums of this step, without zeros, and how much is stored now."""
        now = self._store.counts()
        news = {
            ours: now[theirs] - self._last.get(theirs, 0.0)
            for ours, theirs in _COUNTED.items()
            if now.get(theirs, 0.0) != self._last.get(theirs, 0.0)
        }
        self._last = now
        return news | {ours: now[theirs] for ours, theirs in _LEVELS.items() if theirs in now}


def _folder(path: str) -> Path:
    return expanded(path, "store_path")
