"""Grams: hashes of a few tokens in a row, which tell where two token sequences may be equal.

In: tokens, int64. Out: gram hashes, uint64, and pairs of positions whose grams hash alike. A hash
only proposes: whoever uses a pair compares the tokens themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xD6E8FEB86659FD93


def gram_hashes(ids: Ints, width: int) -> Hashes:
    """Hash of ids[i : i + width] for every i: [len(ids) - width + 1], empty if `ids` is shorter."""
    hashes = ids.astype(np.uint64)
    hashes *= _SPREAD
    hashes ^= hashes >> np.uint64(32)
    hashes *= _SPREAD
    return widen_grams(hashes, 1, width)


def widen_grams(hashes: Hashes, width: int, wider: int) -> Hashes:
    """Hashes of `wider` tokens from hashes of `width` tokens, in log2(wider / width) passes.

    The factor differs from pass to pass, else tokens could change places unnoticed.
    """
    while width < wider:
        step = min(width, wider - width)
        if len(hashes) <= step:
            return hashes[:0]
        longer = hashes[:-step] * np.uint64(pow(_BASE, width, 1 << 64))
        longer += hashes[step:]
        hashes = longer
        width += step
    return hashes


def telling_width(grams: Hashes, width: int) -> int:
    """The narrowest width, in doublings of `width`, at which most grams differ from one another.

    At most a quarter of the sequence, and `width` itself where text is not repetitive. Distinct
    grams are counted by the slots they take in a table, so slightly too few are counted.
    """
    bits = np.uint64(len(grams).bit_length() + 2)
    while len(grams) > 8 * width:
        taken = np.zeros(1 << int(bits), dtype=np.bool_)
        taken[grams >> (np.uint64(64) - bits)] = True
        if 2 * np.count_nonzero(taken) > len(grams):
            break
        grams = widen_grams(grams, width, 2 * width)
        width *= 2
    return width


class GramGroups(NamedTuple):
    """The grams that occur more than once in two sequences, in groups of equal hashes.

    `where` holds their positions, counted on from the new sequence into the old one, ascending
    within a group. A group has its first row in `starts`, and `in_new` and `in_old` members.
    """

    where: Ints
    starts: Ints
    in_new: Ints
    in_old: Ints


def group_grams(new: Hashes, old: Hashes) -> GramGroups:
    """One sort. The position takes the low bits of the sorted key, which the hash can spare:
    sorting plain integers is several times faster than a stable argsort.
    """
    keys = np.concatenate((new, old))
    bits = np.uint64(len(keys).bit_length())
    low = (np.uint64(1) << bits) - np.uint64(1)
    keys &= ~low
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    hashes = keys >> bits
    alike = np.zeros(len(keys) + 1, dtype=np.bool_)
    np.equal(hashes[1:], hashes[:-1], out=alike[1:-1])
    rows = np.flatnonzero(alike[1:] | alike[:-1])
    where = (keys[rows] & low).astype(np.int64)
    starts = np.flatnonzero(~alike[rows])
    sizes = np.diff(starts, append=len(rows))
    in_new = np.add.reduceat(where < len(new), starts, dtype=np.int64) if len(rows) else sizes
    return GramGroups(where, starts, in_new, sizes - in_new)


def pair_grams(new: Hashes, old: Hashes) -> tuple[Ints, Ints]:
    """Positions (i, j) of equal grams, the k-th occurrence paired with the k-th.

    Occurrences are counted once from the front and once from the back, so a gram that stands alone
    on both sides is paired twice, and in repetitive text an edit misleads one of the counts only.
    Not in order.
    """
    where, starts, in_new, in_old = group_grams(new, old)
    group = np.repeat(np.arange(len(starts)), in_new)
    rank = np.arange(len(group)) - (in_new.cumsum() - in_new)[group]
    first, mine, theirs = starts[group], in_new[group], in_old[group]
    front, back = rank < theirs, rank >= mine - theirs
    i = where[first + rank]
    partner = first + rank + mine
    return (
        np.concatenate((i[front], i[back])),
        np.concatenate((where[partner[front]], where[(partner - mine + theirs)[back]])) - len(new),
    )
