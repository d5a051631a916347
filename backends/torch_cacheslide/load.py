"""How cached keys and values come from the store into the working slots.

In: a plan, the store, a working cache. Out: `fill(layer)`, which reads the runs of one layer, turns
the keys to where they now stand and writes both into the home slots; and the loader that calls it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import torch
from torch import Tensor

from cacheslide_agents.chunks import Run
from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages.base import PageStore, StoredContext
from cacheslide_agents.pages.loader import Fill, Loader, loader_for
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.position.base import Position
from torch_cacheslide.cache import WorkingCache


class Decoupling(StrEnum):
    """When a layer's new keys and values meet its load; figures in docs/decisions.md.

    `OFF`: a layer starts when its load is done. `LATE`: it starts before and waits with its new
    keys and values in hand, then writes them home. `SLOTS`: those that come before their load go to
    fresh slots (`SlotMap`), and only attention waits.
    """

    OFF = "off"
    LATE = "late"
    SLOTS = "slots"

    @classmethod
    def of(cls, value: bool | str) -> Decoupling:
        """`True` is the faster way of the two."""
        if isinstance(value, bool):
            return cls.LATE if value else cls.OFF
        if value not in list(cls):
            raise RequestError(f"decoupling={value!r} must be a bool, 'off', 'late' or 'slots'")
        return cls(value)


@dataclass(frozen=True)
class Loading:
    """`depth` layers are loaded ahead of computation by a thread of their own; 0: inline.

    `None`: ahead when pages must be read from SSD or a core is idle, else inline.
    """

    depth: int | None = None
    decoupling: Decoupling = Decoupling.LATE

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 0:
            raise RequestError(f"prefetch={self.depth!r} must be at least 0 layers, or None")

    def spare(self, plan: Plan) -> int:
        """Fresh slots for the corrections of `plan`, unless fusion or gate need the load first."""
        policy = plan.policy
        if self.decoupling is not Decoupling.SLOTS or policy.fusion.needs_cached or policy.gate:
            return 0
        if plan.narrow is None:
            return int((plan.hit & plan.active).sum())
        return plan.narrow.budget(len(plan.view.candidates)) if plan.view else 0

    def loader(
        self, fill: Fill, plan: Plan, store: PageStore, layers: int, device: torch.device
    ) -> Loader:
        def gains() -> bool:
            resident = all(store.in_memory(source) for source in sources_of(plan))
            return not resident or device.type != "cpu" or _idle_core()

        return loader_for(fill, layers, self.depth if plan.runs else 0, device, gains)


class RunLoad:
    """Fills one layer with every run of `plan`, or with the head where all else is computed.

    `total` [] sums up whatever was loaded: attention kernels may turn NaN into plausible numbers.
    """

    def __init__(
        self,
        plan: Plan,
        store: PageStore,
        position: Position,
        cos_sin: tuple[Tensor, Tensor],
        cache: WorkingCache,
    ) -> None:
        self._plan, self._store, self._position, self._cache = plan, store, position, cache
        self._cos, self._sin = cos_sin
        self.total = torch.zeros((), dtype=torch.float32, device=self._cos.device)
        self._whole = _by_source(plan, len(plan.ids))
        self._head = _by_source(plan, plan.head) if plan.narrow else self._whole

    def __call__(self, layer: int) -> None:
        narrow = self._plan.narrow
        for source, runs in self._head if narrow and layer <= narrow.layer else self._whole:
            self._fill(layer, source, runs)

    def _fill(self, layer: int, source: StoredContext, runs: Sequence[Run]) -> None:
        ranges = [(run.cached_start, run.cached_stop) for run in runs]
        keys, values = (
            tensor.to(self.total.device, non_blocking=True)
            for tensor in self._store.load(source, layer, ranges)
        )
        there = 0
        for run in runs:
            loaded, here = slice(there, there + run.length), slice(run.start, run.stop)
            there += run.length
            self._position.rotate(
                keys[:, loaded],
                self._cos[here],
                self._sin[here],
                out=self._cache.keys[layer][:, here],
            )
            self._cache.values[layer][:, here] = values[:, loaded]
        for part in (keys, values):
            self.total += part.sum(dtype=torch.float32)


def sources_of(plan: Plan) -> list[StoredContext]:
    """The stored contexts that `plan` reads, each once."""
    return list(dict.fromkeys(planned.source for planned in plan.runs))


def _by_source(plan: Plan, limit: int) -> list[tuple[StoredContext, list[Run]]]:
    """Runs before row `limit`, neighbours of one source together."""
    cut = [
        (planned.source, Run(run.start, run.cached_start, min(run.stop, limit) - run.start))
        for planned in plan.runs
        if (run := planned.run).start < limit
    ]
    groups = groupby(cut, key=lambda pair: id(pair[0]))
    return [(pairs[0][0], [run for _, run in pairs]) for _, each in groups if (pairs := list(each))]


def _idle_core() -> bool:
    """Whether this process may use more cores than its intra-op threads take."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return cores > torch.get_num_threads()
