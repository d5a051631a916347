"""Whether approximate reuse may be trusted, kind of prompt by kind of prompt.

In: reuses as they happen, and now and then how far one was from dense. Out: which reuses to check,
and which kinds of prompt are answered densely until a check succeeds again. Nothing runs here: the
executor does the checks, in idle time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from threading import Lock

from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages.base import ContextKey

SUGGESTED_EVERY = 16
"""A sensible `every` for users: one dense prefill, in idle time, for every 16 reuses."""
DEFAULT_BUDGET = 0.05
"""Nats; see docs/decisions.md."""
_WATCHED = 4096
"""Kinds of prompt remembered; the one longest without a reuse is forgotten first."""


class Verdict(StrEnum):
    """What a check has changed."""

    TRUSTED = "trusted"
    TRIPPED = "tripped"
    DISTRUSTED = "distrusted"
    LIFTED = "lifted"


@dataclass
class _Watched:
    reuses: int = 0
    distances: list[float] = field(default_factory=list)
    tripped_at: float | None = None


class QualityGuard:
    """Counts reuses of each key (model, tenant, task) and judges those that were checked.

    Every `every`-th reuse is due for a check: KL(dense || reuse) of the next-token distribution, in
    nats. When the mean of the last `window` checks passes `budget`, the key is on dense. It is off
    it again with the first check, of contexts that were stored since, that is within `budget`.
    """

    def __init__(
        self, every: int = SUGGESTED_EVERY, budget: float = DEFAULT_BUDGET, window: int = 8
    ) -> None:
        for name, value in (("guard_every", every), ("window", window)):
            if not isinstance(value, int) or value < 1:
                raise RequestError(f"{name}={value!r} must be a whole number of at least 1")
        if not 0.0 < budget < float("inf"):
            raise RequestError(f"guard_budget={budget!r} must be finite and above 0 nats")
        self._every, self._budget, self._window = every, budget, window
        self._watched: OrderedDict[ContextKey, _Watched] = OrderedDict()
        self._counts = {"checks": 0, "trips": 0, "lifts": 0, "declined": 0}
        self._lock = Lock()

    def due(self, key: ContextKey) -> bool:
        """Count one reuse of `key`; true when it is to be checked."""
        with self._lock:
            watched = self._of(key)
            watched.reuses += 1
            return watched.reuses % self._every == 0

    def declines(self, key: ContextKey) -> bool:
        """Whether a reuse of `key` must be answered densely; counts it if so."""
        with self._lock:
            declined = self._of(key).tripped_at is not None
            self._counts["declined"] += declined
            return declined

    def tripped_at(self, key: ContextKey) -> float | None:
        """When `key` was put on dense; contexts stored later are to be checked again."""
        with self._lock:
            return self._of(key).tripped_at

    def record(self, key: ContextKey, distance: float, now: float) -> Verdict:
        """`distance`: KL(dense || reuse) in nats of one check that ended at `now` (seconds)."""
        with self._lock:
            watched = self._of(key)
            self._counts["checks"] += 1
            if watched.tripped_at is not None:
                within = distance <= self._budget
                return self._turn(watched, None, Verdict.LIFTED) if within else Verdict.DISTRUSTED
            watched.distances = [*watched.distances, distance][-self._window :]
            within = fmean(watched.distances) <= self._budget
            return Verdict.TRUSTED if within else self._turn(watched, now, Verdict.TRIPPED)

    def metrics(self) -> Mapping[str, float]:
        """Since the start: checks, trips, lifts, declined requests; now: keys on dense."""
        with self._lock:
            on_dense = sum(one.tripped_at is not None for one in self._watched.values())
            totals = {f"guard_{name}": float(count) for name, count in self._counts.items()}
            return totals | {"guard_on_dense": float(on_dense)}

    def _turn(self, watched: _Watched, tripped_at: float | None, verdict: Verdict) -> Verdict:
        """What was measured under the other state says nothing about the new one."""
        watched.tripped_at = tripped_at
        watched.distances = []
        self._counts["trips" if verdict is Verdict.TRIPPED else "lifts"] += 1
        return verdict

    def _of(self, key: ContextKey) -> _Watched:
        watched = self._watched.setdefault(key, _Watched())
        self._watched.move_to_end(key)
        if len(self._watched) > _WATCHED:
            trusted = (each for each, one in self._watched.items() if one.tripped_at is None)
            del self._watched[next(trusted, next(iter(self._watched)))]
        return watched
