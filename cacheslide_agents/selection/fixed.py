"""Selections known beforehand, for tests and ablations.

In: positions, or nothing. Out: those of them that are candidates, or all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cacheslide_agents.selection.base import Positions, SelectionView


@dataclass(frozen=True)
class Fixed:
    """The prompt positions `indices`, as far as they are candidates."""

    indices: tuple[int, ...]

    def select(self, view: SelectionView) -> Positions:
        wanted = np.asarray(self.indices, dtype=np.int64)
        return np.intersect1d(view.candidates, wanted)


@dataclass(frozen=True)
class Everything:
    """Every candidate: the prefill then equals a dense one."""

    def select(self, view: SelectionView) -> Positions:
        return view.candidates
