"""Which shifts and which runs the equal grams of two token sequences speak for.

In: the grams of both, and pairs of positions known to belong together. Out: the shifts with most
votes, and how many votes lie on a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cacheslide_agents.prompt.grams import Hashes, pair_grams, telling_width, widen_grams

Ints = npt.NDArray[np.int64]
Pairs = tuple[Ints, Ints]
"""Positions i in the new and j in the cached sequence, one pair a row."""

_STRONG = 8
"""Votes of a pair that is hardly a coincidence."""


@dataclass(frozen=True)
class Votes:
    """Pairs with their weights. `zero` is more than any j, so that i - j + zero is not negative."""

    pairs: tuple[tuple[Pairs, int], ...]
    zero: int

    @classmethod
    def cast(cls, grams: Hashes, cached_grams: Hashes, width: int, known: Pairs) -> Votes:
        """Grams of `width` tokens vote. Where these repeat, the narrowest grams that tell places
        apart vote too, and more strongly; so do the `known` pairs.
        """
        pairs = [(pair_grams(grams, cached_grams), 1)]
        if len(known[0]):
            pairs.append((known, _STRONG))
        wide = telling_width(grams, width)
        if wide > width:
            wider = (widen_grams(side, width, wide) for side in (grams, cached_grams))
            pairs.append((pair_grams(*wider), _STRONG))
        return cls(tuple(pairs), len(cached_grams) + width)

    @property
    def paired(self) -> Ints:
        """Positions i of the grams, of the first width, that the cached side knows."""
        return self.pairs[0][0][0]

    def shifts(self, most: int) -> Ints:
        """The shifts with any votes; of more than `most` those with most votes."""
        top = max(int((i - j).max(initial=-self.zero)) for (i, j), _ in self.pairs)
        votes = np.zeros(top + self.zero + 1, dtype=np.int64)
        for (i, j), weight in self.pairs:
            votes += weight * np.bincount(i - j + self.zero, minlength=len(votes))
        shifts = np.flatnonzero(votes)
        return largest(shifts, votes[shifts], most) - self.zero

    def on(self, runs: Ints) -> Ints:
        """Votes that lie on each of `runs`, rows (start, cached_start, length)."""
        start, cached_start, length = runs.T
        row = int((start + length).max(initial=0)) + 1
        first = (start - cached_start + self.zero) * row + start
        votes = np.zeros(len(runs), dtype=np.int64)
        for (i, j), weight in self.pairs:
            inside = i < row
            places = np.sort((i - j + self.zero)[inside] * row + i[inside])
            counts = np.searchsorted(places, first + length) - np.searchsorted(places, first)
            votes += weight * counts
        return votes


def largest(rows: Ints, sizes: Ints, most: int) -> Ints:
    """The `most` rows of largest size, in any order; all rows, as they are, if they are fewer."""
    return rows if len(rows) <= most else rows[np.argpartition(sizes, -most)[-most:]]
