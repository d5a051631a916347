"""What a store is told of a request that becomes a cached context.

In: the runs it was planned with, which of its tokens were exact or corrected. Out: the same of all
that is stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cacheslide_agents.pages.base import ReusedRun
from cacheslide_agents.policies.base import PlannedRun

Marks = npt.NDArray[np.bool_]


def exact_with(exact: Marks, more: int) -> Marks:
    """[n + more]: `exact` [n], and `more` tokens computed densely behind them, which are exact if
    all of those are."""
    return np.concatenate([exact, np.full(more, bool(exact.all()))])


def reused_runs(runs: Iterable[PlannedRun], corrected: Marks) -> tuple[ReusedRun, ...]:
    """`runs` as a store knows them; of the prompt's tokens, `corrected` [n] are stored anew."""
    return tuple(
        ReusedRun(
            planned.source,
            run.start,
            run.cached_start,
            run.length,
            corrected[run.start : run.stop].copy(),
        )
        for planned in runs
        for run in [planned.run]
    )
