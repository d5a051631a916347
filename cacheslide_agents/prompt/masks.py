"""Marks over tokens: how far they hold, and how many there are.

In: bool [n], or two sequences of tokens. Out: counts of tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def leading(marks: Marks) -> int:
    """How many at the start are true."""
    return len(marks) if marks.all() else int(marks.argmin())


def common_head(left: Ints, right: Ints) -> int:
    """How many tokens at the start are equal."""
    shorter = min(len(left), len(right))
    return leading(left[:shorter] == right[:shorter])


def running_total(marks: Marks) -> Ints:
    """[n + 1]: how many before each index are true."""
    return np.concatenate(([0], np.cumsum(marks)))
