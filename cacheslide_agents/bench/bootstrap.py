"""How far a mean can be trusted: the percentile bootstrap (Efron, 1979).

In: one number per row. Out: the interval that holds the mean of rows drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cacheslide_agents.errors import DataError

RESAMPLES = 10_000
AT_ONCE = 256
"""Resamples held in memory together."""


def mean_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The interval in which the mean of as many rows, drawn with replacement, lies at `level`.

    For paired runs `values` are the differences, row by row. The same `seed` gives the same
    interval. `DataError` without a row.
    """
    rows = np.asarray(values, dtype=np.float64)
    if not rows.size:
        raise DataError("a bootstrap interval needs at least one row")
    random = np.random.default_rng(seed)
    parts = [
        rows[random.integers(0, rows.size, (min(AT_ONCE, resamples - done), rows.size))].mean(
            axis=1
        )
        for done in range(0, resamples, AT_ONCE)
    ]
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(np.concatenate(parts), (tail, 1.0 - tail))
    return float(low), float(high)
