"""The first tokens after every change.

In: the runs of one request. Out: positions at the start of each run that follows an edit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cacheslide_agents.chunks import Run
from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection.base import Positions, SelectionView


@dataclass(frozen=True)
class Boundary:
    """Recompute the first `tokens` of each reused run that follows an edit.

    Source: EPIC (LegoLink), which does it at the start of every chunk. The tokens after a seam
    attend most to what stands just before it. A run shorter than `min_run` gives only the share
    tokens / min_run of its length, rounded up: a prompt that is changed in many small places then
    costs no larger share of its reused tokens than `tokens` of every `min_run`. `min_run=0` takes
    `tokens` of every run, however short; `tokens=math.inf` takes the runs whole.
    """

    tokens: float = 16
    min_run: int = 64

    def __post_init__(self) -> None:
        if not self.tokens >= 0:
            raise RequestError(f"Boundary(tokens={self.tokens!r}) must be at least 0")
        if self.min_run < 0:
            raise RequestError(f"Boundary(min_run={self.min_run!r}) must be at least 0")

    def select(self, view: SelectionView) -> Positions:
        chosen = np.zeros(len(view.ids), dtype=np.bool_)
        for run in view.runs:
            if run.start >= view.first_change:
                chosen[run.start : run.start + self._depth(run)] = True
        return view.candidates[chosen[view.candidates]]

    def _depth(self, run: Run) -> int:
        if run.length >= self.min_run or math.isinf(self.tokens):
            return int(min(self.tokens, run.length))
        share = math.ceil(self.tokens * run.length / self.min_run)
        return min(share, run.length)
