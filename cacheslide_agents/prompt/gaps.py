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
from cacheslide_agents.prompt.grams import gram_hashes, pair_grams, widen_grams
from cacheslide_agents.prompt.runs import best_chain, equal_runs

Ints = npt.NDArray[np.int64]

_SHIFTS = 32
"""Shifts tried in one gap, those with most votes."""
_WIDER = 8
"""Where more shifts than that have votes, grams this many times wider vote too."""
_RUNS, _TOKENS_PER_RUN = 48, 128
"""Runs weighed against each other in one gap, the longest: so many, and one per so many tokens."""
_GAP_WORK, _RUN_WORK = 2000, 30
"""What a gap, and a run weighed in it, cost besides the gap's tokens: in tokens, by the clock."""
_WORK, _WORK_PER_TOKEN = 7000, 2
"""Work allowed in one search, and per token of both sides."""


class GapSearch:
    """One search. `gap` is what head and tail left; `chunks` are rows (start, cached_start, length)
    of chunks that ought to be equal.
    """

    def __init__(self, new: Ints, old: Ints, gap: Edit, chunks: Ints, min_run: int) -> None:
        self._new = new[gap.start : gap.stop]
        self._old = old[gap.cached_start : gap.cached_stop]
        self._origin = (gap.start, gap.cached_start, 0)
        self._chunks = chunks - self._origin
        self._min_run = min_run
        self._grams = gram_hashes(self._new, min_run)
        self._cached_grams = gram_hashes(self._old, min_run)
        self._paired = np.ones(len(self._grams), dtype=np.bool_)
        self._queue: list[tuple[int, int, Edit]] = []

    def runs(self) -> list[Run]:
        """Ascending, disjoint on both sides, each at least `min_run` long."""
        found: list[Run] = []
        work = _WORK + _WORK_PER_TOKEN * (len(self._new) + len(self._old))
        self._enqueue([Edit(0, len(self._new), 0, len(self._old))])
        while self._queue and work > 0:
            gap = heappop(self._queue)[-1]
            candidates = self._candidates(gap)
            work -= _GAP_WORK + _RUN_WORK * len(candidates)
            work -= gap.stop - gap.start + gap.cached_stop - gap.cached_start
            chain = best_chain(candidates, self._min_run)
            runs = [Run(*row) for row in chain.tolist()]
            if runs:
                self._enqueue(_between(gap, runs))
            found += [Run(*row) for row in (chain + self._origin).tolist()]
        return sorted(found, key=lambda run: run.start)

    def _enqueue(self, gaps: Iterable[Edit]) -> None:
        """Queue the gaps in which some gram of the new side is known on the cached side."""
        for gap in gaps:
            size = min(gap.stop - gap.start, gap.cached_stop - gap.cached_start)
            if size >= self._min_run and self._paired[self._grams_of(gap)[0]].any():
                heappush(self._queue, (-size, gap.start, gap))

    def _grams_of(self, gap: Edit) -> tuple[slice, slice]:
        """The grams that lie wholly in the gap, on either side."""
        beyond = self._min_run - 1
        return (
            slice(gap.start, max(gap.start, gap.stop - beyond)),
            slice(gap.cached_start, max(gap.cached_start, gap.cached_stop - beyond)),
        )

    def _candidates(self, gap: Edit) -> Ints:
        new = self._new[gap.start : gap.stop]
        old = self._old[gap.cached_start : gap.cached_stop]
        runs = equal_runs(new, old, self._shifts(gap), self._min_run)
        runs = _largest(runs, runs[:, 2], _RUNS + len(new) // _TOKENS_PER_RUN)
        return runs + (gap.start, gap.cached_start, 0)

    def _shifts(self, gap: Edit) -> Ints:
        """Shifts within the gap that its grams, and the chunks that lie in it, vote for."""
        here, there = self._grams_of(gap)
        grams, cached_grams = self._grams[here], self._cached_grams[there]
        i, j = pair_grams(grams, cached_grams)
        self._paired[here] = False
        self._paired[here][i] = True
        zero = gap.cached_stop - gap.cached_start
        votes = np.bincount(i - j + zero, minlength=zero + gap.stop - gap.start)
        starts, cached_starts, lengths = self._chunks_in(gap).T
        np.add.at(votes, starts - cached_starts + zero, lengths)
        shifts = np.flatnonzero(votes)
        if len(shifts) > _SHIFTS:
            wider = self._min_run * _WIDER
            i, j = pair_grams(
                widen_grams(grams, self._min_run, wider),
                widen_grams(cached_grams, self._min_run, wider),
            )
            np.add.at(votes, i - j + zero, _WIDER)
        return _largest(shifts, votes[shifts], _SHIFTS) - zero

    def _chunks_in(self, gap: Edit) -> Ints:
        """Rows of the chunks inside the gap, counted from its corner."""
        first = np.array((gap.start, gap.cached_start))
        last = np.array((gap.stop, gap.cached_stop))
        starts, lengths = self._chunks[:, :2], self._chunks[:, 2:]
        inside = ((starts >= first) & (starts + lengths <= last)).all(axis=1)
        return self._chunks[inside] - (gap.start, gap.cached_start, 0)


def _largest(rows: Ints, sizes: Ints, count: int) -> Ints:
    return rows if len(rows) <= count else rows[np.argpartition(sizes, -count)[-count:]]


def _between(gap: Edit, runs: Iterable[Run]) -> Iterator[Edit]:
    start, cached_start = gap.start, gap.cached_start
    for run in runs:
        yield Edit(start, run.start, cached_start, run.cached_start)
        start, cached_start = run.stop, run.cached_stop
    yield Edit(start, gap.stop, cached_start, gap.cached_stop)
