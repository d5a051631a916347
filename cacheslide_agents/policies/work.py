"""How much a prefill does, in units that have a price.

In: rows, a plan, or what an executor counted. Out: `Work`, the features of the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from cacheslide_agents.policies.base import Plan

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """What one prefill does, summed over layers.

    `rows`: tokens run through a layer. `pairs`: query-key pairs attended. `loaded`: cached tokens
    brought into a layer. `selecting`: 1 when reuse goes past the common head, else 0.
    """

    rows: float
    pairs: float
    loaded: float = 0.0
    selecting: float = 0.0

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], layers: int) -> Self:
        """The same prompt indices `rows` [r] in each of `layers`; each attends to all before it."""
        return cls(float(len(rows) * layers), float(rows.sum() + len(rows)) * layers)

    @classmethod
    def planned(cls, plan: Plan, layers: int) -> Self:
        """The work `plan` asks for; rows still to be chosen are taken to be average ones."""
        rows = np.flatnonzero(plan.active)
        reuse = cls.measured(plan, [0] * layers, 0.0)
        if plan.narrow is None or plan.view is None:
            return cls.total(reuse, cls.of(rows, layers))
        wide = min(plan.narrow.layer + 1, layers)
        candidates = plan.view.candidates
        kept = plan.narrow.budget(len(candidates)) / max(1, len(candidates))
        return cls.total(
            reuse,
            cls.of(np.union1d(rows, np.arange(plan.head, len(plan.ids))), wide),
            cls.of(rows, layers - wide),
            cls.of(candidates, layers - wide).times(kept),
        )

    @classmethod
    def measured(cls, plan: Plan, rows_per_layer: Sequence[int], pairs: float) -> Self:
        """What an executor counted while it ran `plan`; `pairs` summed over layers."""
        loaded = sum(planned.run.length for planned in plan.runs) * len(rows_per_layer)
        selecting = reuses_past_head(plan)
        return cls(float(sum(rows_per_layer)), float(pairs), float(loaded), float(selecting))

    @classmethod
    def total(cls, *parts: Work) -> Self:
        return cls(*np.sum([astuple(part) for part in parts], axis=0).tolist())

    def times(self, factor: float) -> Work:
        return Work(*(factor * each for each in astuple(self)))

    def vector(self) -> Floats:
        """[5]: one pass, then the fields."""
        return np.array([1.0, *astuple(self)])


def reuses_past_head(plan: Plan) -> bool:
    """Whether a run stands after the first change."""
    return any(planned.run.start >= plan.head for planned in plan.runs)
