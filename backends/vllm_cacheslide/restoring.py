"""Contexts of an earlier engine, found again by all ranks when a new one starts.

In: what each rank's store holds. Out: what all of them hold, for the scheduler's directory. It goes
the way of vLLM's handshake between connectors: once, before the first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages.base import StoredContext
from cacheslide_agents.pages.slide import SlideStore
from vllm_cacheslide.storage import Rank


@dataclass(frozen=True)
class Found(KVConnectorHandshakeMetadata):
    """One rank's contexts, by name and the oldest first; the first rank says what is in them."""

    contexts: Mapping[str, StoredContext | None]


class Restored:
    """What one rank's store held of this model when it was opened."""

    def __init__(self, store: SlideStore, rank: Rank, fingerprint: str) -> None:
        self._store, self._rank = store, rank
        self._mine: dict[str, StoredContext] = {}
        self._common: dict[str, StoredContext] = {}
        for context in store.contexts():
            key = rank.common(context.key)
            if key is not None and key.fingerprint == fingerprint:
                common = replace(context, key=key)
                name = name_of(common)
                self._mine[name], self._common[name] = context, common

    def found(self) -> Found:
        tells = self._rank.head_rank == 0
        return Found({name: each if tells else None for name, each in self._common.items()})

    def take(self, numbers: Mapping[str, int]) -> dict[int, StoredContext]:
        """By number, those that every rank has; of the others nobody will ask, and they go."""
        mine, self._mine, self._common = self._mine, {}, {}
        with suppress(StoreError):  # logged; nobody asks for them any more
            self._store.remove(context for name, context in mine.items() if name not in numbers)
        return {number: mine[name] for name, number in numbers.items() if name in mine}


def held_by_all(found: Iterable[Found], size: int) -> dict[str, StoredContext]:
    """By name, what each of `size` ranks has; in the first rank's order."""
    ranks = [each.contexts for each in found]
    if len(ranks) < size:
        return {}
    return {
        name: context
        for name, context in ranks[0].items()
        if context is not None and all(name in rank for rank in ranks)
    }


def name_of(context: StoredContext) -> str:
    """Alike on every rank, and different for two contexts that were stored one after the other."""
    key = context.key
    told = (key.fingerprint, key.namespace, key.task, context.session, context.isolated)
    hashed = blake2b(repr((*told, context.created)).encode("utf-8", "replace"), digest_size=16)
    hashed.update(context.ids.tobytes())
    hashed.update(context.exact.tobytes())
    return hashed.hexdigest()
