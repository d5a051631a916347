"""How far a converted model is from its original, by prompt length.

In: both models and held-out token windows. Out: NLL of both and KL(original || converted).
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from cacheslide_agents.training.corpus import check_room

ROWS = 512


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Means over all predicted tokens of all windows of one length; natural logarithm."""

    length: int
    windows: int
    nll_original: float
    nll: float
    kl: float


def check_held_out(ids: Sized, lengths: Sequence[int]) -> None:
    """`DataError` where `ids` are too few for a window of every length."""
    check_room(ids, lengths, "the held-out text", "give more of it")


def evaluate(
    original: Any, converted: Any, ids: npt.NDArray[np.int64], lengths: Sequence[int], limit: int
) -> list[HeldOut]:
    """`limit` windows at most of every length, one after the other from the start of `ids`.

    Raises `DataError` as `check_held_out` does.
    """
    check_held_out(ids, lengths)
    return [_at_length(original, converted, ids, length, limit) for length in lengths]


@torch.inference_mode()
def _at_length(
    original: Any, converted: Any, ids: npt.NDArray[np.int64], length: int, limit: int
) -> HeldOut:
    windows = min(limit, len(ids) // length)
    sums = np.zeros(3)
    for number in range(windows):
        window = torch.from_numpy(ids[number * length : (number + 1) * length])
        sums += _window(original, converted, window.to(original.device))
    before, after, kl = (sums / (windows * (length - 1))).tolist()
    return HeldOut(length, windows, before, after, kl)


def _window(original: Any, converted: Any, ids: Tensor) -> npt.NDArray[np.float64]:
    """Summed NLL of the original, of the converted model, and KL."""
    models = (original, converted)
    hidden = [model.model(ids[None], use_cache=False).last_hidden_state[0, :-1] for model in models]
    sums = np.zeros(3)
    for start in range(0, len(ids) - 1, ROWS):
        rows, targets = slice(start, start + ROWS), ids[1:][start : start + ROWS, None]
        p, q = (
            log_softmax(model.lm_head(states[rows]).float(), dim=-1)
            for model, states in zip(models, hidden, strict=True)
        )
        kl = (p.exp() * (p - q)).sum()
        sums += [-float(p.gather(1, targets).sum()), -float(q.gather(1, targets).sum()), float(kl)]
    return sums
