"""Equal runs of two token sequences: found at given shifts, and chosen so that none cross.

In: tokens, int64, and shifts. Out: runs as int64 [k, 3] rows (start, cached_start, length).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_NEVER = np.int64(-(1 << 40))
_BLOCK = 1 << 16
"""Tokens compared at once, so that temporaries stay in the processor's cache."""
_SEAM = 1
"""Tokens that one more run must gain: of two equally long chains the one with fewer runs wins."""


def equal_runs(new: Ints, old: Ints, shifts: Ints, min_run: int) -> Ints:
    """Every maximal run of `min_run` equal tokens or more that has one of the `shifts`."""
    if len(new) > len(old):
        return equal_runs(old, new, -shifts, min_run)[:, [1, 0, 2]]
    width = len(new)
    padded = np.full(len(old) + 2 * width, new.min(initial=0) - 1)
    padded[width : width + len(old)] = old
    at_once = 1 + _BLOCK // (width + 1)
    found = [np.empty((0, 3), dtype=np.int64)]
    for first in range(0, len(shifts), at_once):
        block = shifts[first : first + at_once]
        equal = np.zeros(len(block) * (width + 1) + 1, dtype=np.bool_)
        for row, shift in zip(equal[1:].reshape(len(block), -1), block.tolist(), strict=True):
            np.equal(padded[width - shift : 2 * width - shift], new, out=row[:width])
        starts, lengths = _true_runs(equal, min_run)
        row_of, start = np.divmod(starts - 1, width + 1)
        found.append(np.stack((start, start - block[row_of], lengths), axis=1))
    return np.concatenate(found)


def _true_runs(mask: npt.NDArray[np.bool_], at_least: int) -> tuple[Ints, Ints]:
    """Starts and lengths of the runs of true entries; `mask` begins and ends with a false one."""
    width = 1
    while width < at_least:
        step = min(width, at_least - width)
        mask = mask[:-step] & mask[step:]
        width += step
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    return edges[::2], edges[1::2] - edges[::2] + at_least - 1


def best_chain(runs: Ints, min_run: int) -> Ints:
    """The runs, in order and disjoint on both sides, that hold most tokens together.

    Where a run overlaps its predecessor its own head is cut, if `min_run` tokens are left of it.
    Sparse dynamic programming, quadratic in the number of runs.
    """
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    cuts, gains = _links(runs, min_run)
    totals = runs[:, 2] - _SEAM
    before = [-1] * len(runs)
    for run in range(1, len(runs)):
        reached = totals[:run] + gains[run, :run]
        best = int(reached.argmax())
        if reached[best] > totals[run]:
            totals[run], before[run] = reached[best], best
    chain = []
    last = int(totals.argmax()) if len(runs) else -1
    while last >= 0:
        cut = cuts[last, before[last]] if before[last] >= 0 else 0
        chain.append(runs[last] + (cut, cut, -cut))
        last = before[last]
    return np.array(chain[::-1], dtype=np.int64).reshape(-1, 3)


def _links(runs: Ints, min_run: int) -> tuple[Ints, Ints]:
    """[later, earlier]: tokens the later run gives up to the earlier one, and what it then adds."""
    start, cached_start, length = runs.T
    ahead = np.subtract.outer(start, start)
    np.minimum(ahead, np.subtract.outer(cached_start, cached_start), out=ahead)
    cuts = np.maximum(length - ahead, 0)
    gains = length[:, None] - cuts
    gains[(ahead <= 0) | (gains < min_run)] = _NEVER
    gains -= _SEAM
    return cuts, gains
