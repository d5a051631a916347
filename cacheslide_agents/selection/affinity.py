"""Reused tokens that would look at what changed.

In: scores of how much each candidate has to do with the change. Out: the highest, within a budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection.base import Positions, SelectionView
from cacheslide_agents.selection.budget import check_fraction, share
from cacheslide_agents.selection.overlap import TokenOverlap


@runtime_checkable
class Score(Protocol):
    def score(self, view: SelectionView) -> npt.NDArray[np.float64]:
        """[candidates]; higher is closer to the change, and 0 or less has nothing to do with it."""
        ...


@dataclass(frozen=True)
class Affinity:
    """The `fraction` of the candidates with the highest score, ties by lower position.

    With several `scores` their ranks are added (equal scores share a rank). The budget is an upper
    bound: a candidate that no score connects with the change is never taken. Ours; see
    docs/decisions.md.
    """

    fraction: float = 0.05
    scores: tuple[Score, ...] = (TokenOverlap(),)

    def __post_init__(self) -> None:
        check_fraction(self, self.fraction)
        if not self.scores:
            raise RequestError("Affinity(scores=()) needs at least one score")

    def select(self, view: SelectionView) -> Positions:
        candidates = view.candidates
        budget = share(self.fraction, len(candidates))
        if not budget:
            return candidates[:0]
        scores = np.stack([score.score(view) for score in self.scores])
        touched = np.flatnonzero((scores > 0).any(axis=0))
        places = _added_ranks(scores[:, touched])
        chosen = touched[np.argsort(places, kind="stable")[:budget]]
        return np.sort(candidates[chosen])


def _added_ranks(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """[candidates] from [scores, candidates]; the lowest sum is the best."""
    falling = [np.searchsorted(np.sort(-score), -score) for score in scores]
    ranks: npt.NDArray[np.int64] = np.sum(falling, axis=0)
    return ranks
