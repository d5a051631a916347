"""Searches the gaps between known runs for more of them, largest gap first, within a work budget.

In: the tokens of a prompt and of a cached one, and the gap left by their common head and tail.
Out: the runs found in it. A search that ends early has found fewer runs, never a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Edit, Run
from cacheslide_agents.prompt.grams import gram_hashes
from cacheslide_agents.prompt.runs import best_chain, equal_runs
from cacheslide_agents.prompt.votes import Pairs, Votes, largest

Ints = npt.NDArray[np.int64]

_SHIFTS, _TOKENS_PER_SHIFT = 24, 512
"""Shifts tried in one gap, those with most votes: so many, and one more per so many tokens."""
_RUNS, _TOKENS_PER_RUN = 64, 96
"""Runs weighed against each other in one gap, those with most votes: as with shifts."""
_COUNTED = 4
"""For each of these runs, how many of the longest have their votes counted."""
_GAP_WORK, _RUN_WORK = 2000, 30
"""What a gap, and a run weighed in it, cost besides the gap's tokens: in tokens, by the clock."""
_WORK, _WORK_PER_TOKEN = 6000, 1.25
"""Work allowed in one search, and per token of both sides."""


class GapSearch:
    """One search of `gap`. `known` are pairs of tokens that ought to be equal."""

    def __init__(self, new: Ints, old: Ints, gap: Edit, known: Pairs, min_run: int) -> None:
        self._new = new[gap.start : gap.stop]
        self._old = old[gap.cached_start : gap.cached_stop]
        self._origin = np.array((gap.start, gap.cached_start, 0))
        self._known = known[0] - gap.start, known[1] - gap.cached_start
        self._min_run = min_run
        self._grams = gram_hashes(self._new, min_run)
        self._cached_grams = gram_hashes(self._old, min_run)
        self._paired = np.ones(len(self._grams), dtype=np.bool_)
        self._queue: list[tuple[int, int, Edit]] = []

    def runs(self) -> list[Run]:
        """Ascending, disjoint on both sides, each at least `min_run` long."""
        found: list[Ints] = []
        work = _WORK + _WORK_PER_TOKEN * (len(self._new) + len(self._old))
        self._enqueue([Edit(0, len(self._new), 0, len(self._old))])
        while self._queue and work > 0:
            gap = heappop(self._queue)[-1]
            candidates = self._candidates(gap)
            chain = best_chain(candidates, self._min_run)
            if len(chain):
                self._enqueue(_between(gap, chain.tolist()))
                found.extend(chain + self._origin)
            work -= _GAP_WORK + _RUN_WORK * len(candidates)
            work -= gap.stop - gap.start + gap.cached_stop - gap.cached_start
        return sorted((Run(*row.tolist()) for row in found), key=lambda run: run.start)

    def _enqueue(self, gaps: Iterable[Edit]) -> None:
        """Queue the gaps that hold a gram the cached side knew when it was last looked up."""
        for gap in gaps:
            size = min(gap.stop - gap.start, gap.cached_stop - gap.cached_start)
            if size >= self._min_run and self._paired[self._grams_in(gap)[0]].any():
                heappush(self._queue, (-size, gap.start, gap))

    def _grams_in(self, gap: Edit) -> tuple[slice, slice]:
        """The grams that lie wholly in the gap, on either side."""
        here = slice(gap.start, gap.stop - self._min_run + 1)
        there = slice(gap.cached_start, gap.cached_stop - self._min_run + 1)
        return here, there

    def _candidates(self, gap: Edit) -> Ints:
        """Runs of the gap, rows (start, cached_start, length), not in order."""
        here, there = self._grams_in(gap)
        known = self._known_in(gap)
        votes = Votes.cast(self._grams[here], self._cached_grams[there], self._min_run, known)
        self._paired[here] = False
        self._paired[here][votes.paired] = True
        new = self._new[gap.start : gap.stop]
        old = self._old[gap.cached_start : gap.cached_stop]
        shifts = votes.shifts(_SHIFTS + len(new) // _TOKENS_PER_SHIFT)
        runs = equal_runs(new, old, shifts, self._min_run)
        most = _RUNS + len(new) // _TOKENS_PER_RUN
        if len(runs) > most:
            runs = largest(runs, runs[:, 2], _COUNTED * most)
            runs = largest(runs, votes.on(runs), most)
        runs += np.array((gap.start, gap.cached_start, 0))
        return runs

    def _known_in(self, gap: Edit) -> Pairs:
        """The known pairs inside the gap, counted from its corner."""
        i, j = self._known
        inside = (i >= gap.start) & (i < gap.stop) & (j >= gap.cached_start) & (j < gap.cached_stop)
        return i[inside] - gap.start, j[inside] - gap.cached_start


def _between(gap: Edit, runs: Iterable[tuple[int, int, int]]) -> Iterator[Edit]:
    """What `runs` leave of the gap."""
    start, cached_start = gap.start, gap.cached_start
    for run_start, run_cached_start, length in runs:
        yield Edit(start, run_start, cached_start, run_cached_start)
        start, cached_start = run_start + length, run_cached_start + length
    yield Edit(start, gap.stop, cached_start, gap.cached_stop)
