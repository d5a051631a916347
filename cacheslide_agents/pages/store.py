"""Stored contexts in memory, under a byte budget.

In: contexts with their keys and values. Out: contexts by key or by tokens, and their layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from threading import RLock

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.errors import PageError, RequestError
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext
from cacheslide_agents.pages.eviction import Eviction, Lru
from cacheslide_agents.pages.resident import (
    Content,
    Resident,
    check_tensors,
    compact,
    content_of,
    tensor_bytes,
)

_COUNTED = ("hits", "misses", "evictions", "superseded", "refused")


class MemoryStore:
    """A `PageStore` whose only tier is memory; safe to call from several threads.

    The tensors put in are the store's from then on: nobody may write to them, nor to what `load`
    gives, which is not a copy. They never weigh more than `budget_bytes`; `eviction` says who goes.
    Contexts of pinned sessions stay. Of one text at most `copies_per_content` contexts are kept and
    of one named session at most `copies_per_session`, pinned or not: a new one supersedes the least
    exact, then oldest, copy of its text and the least recently used context of its session.
    """

    def __init__(
        self,
        budget_bytes: int,
        eviction: Eviction | None = None,
        copies_per_content: int = 2,
        copies_per_session: int = 4,
    ) -> None:
        limits = {
            "budget_bytes": budget_bytes,
            "copies_per_content": copies_per_content,
            "copies_per_session": copies_per_session,
        }
        for name, value in limits.items():
            if not isinstance(value, int) or value < 1:
                raise RequestError(f"MemoryStore({name}={value!r}) must be at least 1, and whole")
        self._budget = budget_bytes
        self._eviction = eviction or Lru()
        self._copies_per_content = copies_per_content
        self._copies_per_session = copies_per_session
        self._lock = RLock()
        self._clock = count(1)
        self._residents: dict[StoredContext, Resident] = {}
        self._by_content: dict[Content, list[Resident]] = {}
        self._pinned: set[str] = set()
        self._bytes = 0
        self._counts: Counter[str] = Counter()

    def put(
        self,
        context: StoredContext,
        layers: Sequence[LayerKV],
        residuals: Mapping[int, Tensor] | None = None,
    ) -> bool:
        """Store `context`; false, and counted, when it cannot fit or holds no token.

        Tensors that fill their memory are taken as they are, views are copied, so that no slack
        memory is kept. Raises `PageError` when a tensor does not hold the context's tokens.
        """
        checkpoints = residuals or {}
        check_tensors(context, layers, checkpoints)
        nbytes = tensor_bytes(layers, checkpoints)
        if not 0 < nbytes <= self._budget:
            with self._lock:
                self._counts["refused"] += 1
            return False
        resident = Resident(
            context,
            tuple((compact(keys), compact(values)) for keys, values in layers),
            {layer: compact(states) for layer, states in checkpoints.items()},
            content_of(context.key, context.isolated, context.ids),
            nbytes,
        )
        with self._lock:
            return self._admit(resident)

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]:
        with self._lock:
            found = [
                resident.context
                for resident in reversed(self._residents.values())
                if resident.context.key == key and not resident.context.isolated
            ]
        if session is not None:
            found.sort(key=lambda context: context.session != session)
        return found

    def find_isolated(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> StoredContext | None:
        with self._lock:
            copies = self._by_content.get(content_of(key, True, ids))
            return copies[-1].context if copies else None

    def load(self, context: StoredContext, layer: int) -> LayerKV:
        with self._lock:
            resident = self._residents.get(context)
            if resident is None or not 0 <= layer < len(resident.layers):
                self._counts["misses"] += 1
                raise PageError(self._why_missing(context, resident, layer))
            self._counts["hits"] += 1
            resident.used = next(self._clock)
            return resident.layers[layer]

    def residual(self, context: StoredContext, layer: int) -> Tensor | None:
        """Hidden states after `layer`; `None` where none are stored, or no longer."""
        with self._lock:
            resident = self._residents.get(context)
            return resident.residuals.get(layer) if resident else None

    def pin(self, session: str) -> None:
        """Keep this session's contexts, present and future, until `unpin`."""
        with self._lock:
            self._pinned.add(session)

    def unpin(self, session: str) -> None:
        with self._lock:
            self._pinned.discard(session)

    def clear(self) -> None:
        """Forget every context, pinned ones too; pins and counters stay."""
        with self._lock:
            self._residents.clear()
            self._by_content.clear()
            self._bytes = 0

    def metrics(self) -> Mapping[str, float]:
        """Now: contexts, pages, bytes. Since the start: layers loaded (`hits`) or asked for in vain
        (`misses`), contexts evicted for room, superseded by newer copies, and refused."""
        with self._lock:
            totals = {name: float(self._counts[name]) for name in _COUNTED}
            return totals | {
                "contexts": float(len(self._residents)),
                "pages": float(sum(resident.pages for resident in self._residents.values())),
                "memory_bytes": float(self._bytes),
                "memory_budget_bytes": float(self._budget),
            }

    def _admit(self, resident: Resident) -> bool:
        superseded = self._superseded_by(resident)
        evicted = self._victims(resident.nbytes, superseded)
        if evicted is None:
            self._counts["refused"] += 1
            return False
        self._drop(superseded, "superseded")
        self._drop(evicted, "evictions")
        resident.used = next(self._clock)
        self._residents[resident.context] = resident
        self._by_content.setdefault(resident.content, []).append(resident)
        self._bytes += resident.nbytes
        return True

    def _superseded_by(self, newcomer: Resident) -> list[Resident]:
        """Those that must go for the bounds on copies to hold, whatever room there is."""
        context = newcomer.context
        same = self._residents.get(context)
        copies = [r for r in self._by_content.get(newcomer.content, ()) if r is not same]
        copies.sort(key=lambda r: (self._is_pinned(r), int(r.context.exact.sum())))
        going = [*_surplus(copies, self._copies_per_content), *([same] if same else [])]
        turns = [
            r
            for r in self._residents.values()
            if _same_session(r.context, context) and r not in going
        ]
        turns.sort(key=lambda r: r.used)
        return [*going, *_surplus(turns, self._copies_per_session)]

    def _victims(self, nbytes: int, superseded: Iterable[Resident]) -> list[Resident] | None:
        """Those evicted to make room besides the superseded ones; `None` if that cannot do."""
        gone = set(superseded)
        excess = self._bytes + nbytes - self._budget - sum(resident.nbytes for resident in gone)
        victims: list[Resident] = []
        for resident in self._eviction.order(
            r for r in self._residents.values() if r not in gone and not self._is_pinned(r)
        ):
            if excess <= 0:
                break
            victims.append(resident)
            excess -= resident.nbytes
        return victims if excess <= 0 else None

    def _drop(self, residents: Iterable[Resident], reason: str) -> None:
        for resident in residents:
            del self._residents[resident.context]
            copies = self._by_content[resident.content]
            copies.remove(resident)
            if not copies:
                del self._by_content[resident.content]
            self._bytes -= resident.nbytes
            self._counts[reason] += 1

    def _is_pinned(self, resident: Resident) -> bool:
        return resident.context.session in self._pinned

    def _why_missing(self, context: StoredContext, resident: Resident | None, layer: int) -> str:
        what = f"a context of {len(context)} tokens of task {context.key.task!r}"
        if resident is not None:
            return f"{what} has no layer {layer}: it was stored with {len(resident.layers)} layers"
        return (
            f"{what} is no longer in memory; raise the store's budget of {self._budget} bytes, "
            "or pin its session"
        )


def _same_session(context: StoredContext, other: StoredContext) -> bool:
    """Whether both are in-context requests of one named session."""
    if context.session is None or context.isolated or other.isolated:
        return False
    return (context.key, context.session) == (other.key, other.session)


def _surplus(residents: Sequence[Resident], limit: int) -> Sequence[Resident]:
    """The first of `residents` that must go so that one more makes no more than `limit`."""
    return residents[: max(0, len(residents) - limit + 1)]
