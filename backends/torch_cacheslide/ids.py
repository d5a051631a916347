"""Token ids as callers give them.

In: a sequence and the size of a vocabulary. Out: how many ids it holds, or what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cacheslide_agents.errors import RequestError


def check_ids(name: str, ids: Sequence[int], vocabulary: int) -> int:
    """How many they are. `RequestError` names `name`; what is not whole is never cut off."""
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuO"):
        raise RequestError(f"{name} must be one flat sequence of integer token ids")
    if not array.size:
        raise RequestError(f"{name} is empty; give at least one token")
    if array.dtype.kind == "O" and not all(isinstance(each, int) for each in ids):
        raise RequestError(f"{name} must be one flat sequence of integer token ids")
    low, high = array.min(), array.max()
    if low < 0 or high >= vocabulary:
        raise RequestError(
            f"{name} holds {low if low < 0 else high}, outside the vocabulary of "
            f"{vocabulary}; is this the model's own tokenizer?"
        )
    return len(array)
