"""A small robust fit of prices to observed times.

In: features [observations, prices], seconds, and prices from first principles. Out: non-negative
prices. Errors count relative to the time observed, so short and long prefills weigh alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_SPREAD = 3.0
"""How far a price may well move in one round, as a multiple of its prior or last value."""
_MOST_DEVIATION, _LEAST_DEVIATION = 0.1, 0.01
"""Bounds on what the relative error of one observed time is thought to be."""
_OUTLIER = 2.0
"""Residuals beyond this many deviations lose weight (Huber)."""
_ROUNDS = 6


def fit_seconds(features: Floats, seconds: Floats, nominal: Floats) -> Floats:
    """Prices [p] >= 0 with `features @ prices` near `seconds`.

    Starts from the nominal prices at the observed speed. Each round is a ridge regression towards
    the last prices (a proximal step: what the data does not tell stays as it was), reweighted
    against outliers (Huber; deviation from the median residual).
    """
    speed = np.median(seconds / (features @ nominal))
    prior = nominal * speed
    # columns: each price in units of its prior; rows: relative to the time observed
    design = features * prior / seconds[:, None]
    weights, deviation = np.ones(len(seconds)), _MOST_DEVIATION
    scaled = np.ones(len(prior))
    for _ in range(_ROUNDS):
        pull = (min(deviation, _MOST_DEVIATION) / _SPREAD / np.maximum(scaled, 1.0)) ** 2
        scaled = _non_negative_ridge(design * weights[:, None], design, pull, scaled)
        residuals = np.abs(design @ scaled - 1.0)
        deviation = max(1.4826 * float(np.median(residuals)), _LEAST_DEVIATION)
        weights = np.minimum(1.0, _OUTLIER * deviation / np.maximum(residuals, 1e-12))
    return prior * scaled


def _non_negative_ridge(weighted: Floats, design: Floats, pull: Floats, last: Floats) -> Floats:
    """Prices x >= 0 with small sum(w (design x - 1)^2) + sum(pull (x - last)^2).

    Active set without re-entry: a price that comes out negative is zero in this round.
    """
    gram = weighted.T @ design + np.diag(pull)
    target = weighted.sum(axis=0) + pull * last
    kept = np.arange(len(target))
    while True:
        solution = np.linalg.solve(gram[np.ix_(kept, kept)], target[kept])
        if (solution >= 0.0).all():
            break
        kept = kept[solution >= 0.0]
    prices = np.zeros(len(target))
    prices[kept] = solution
    return prices
