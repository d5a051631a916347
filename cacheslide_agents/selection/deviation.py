"""The paper's choice: tokens whose freshly computed key differs most from the cached one.

In: new and cached keys of all candidates at one layer. Out: candidates, largest deviation first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection.base import Positions, SelectionView
from cacheslide_agents.selection.budget import check_fraction, share


@dataclass(frozen=True)
class KeyDeviation:
    """CacheSlide, Algorithm 2 (WCA): the largest squared key deviation at `layer`.

    Layers 0..`layer` run for every token; then the `fraction` of the candidates with the largest
    d = |K_new - K_cached|^2, summed over heads and dimensions, is corrected in the layers above.
    Ties go to the lower position. `layer` counts from 0. Two departures: keys are position-free, so
    layer 0, whose keys do not depend on the context, says nothing and the default is 1; and a
    candidate is eligible only if d > `noise` * |K_cached|^2, lest rounding be corrected.
    """

    layer: int = 1
    fraction: float = 0.26
    noise: float = 1e-6

    def __post_init__(self) -> None:
        check_fraction(self, self.fraction)
        if self.layer < 0:
            raise RequestError(f"KeyDeviation(layer={self.layer!r}) must be at least 0")
        if not self.noise >= 0:
            raise RequestError(f"KeyDeviation(noise={self.noise!r}) must be at least 0")

    def rank(self, view: SelectionView, new_keys: Tensor, cached_keys: Tensor) -> Positions:
        wide = torch.promote_types(cached_keys.dtype, torch.float32)
        cached = cached_keys.to(wide)
        deviation = _squared_norm(new_keys.to(wide) - cached)
        norm = _squared_norm(cached)
        eligible = np.flatnonzero(deviation > self.noise * norm)
        order = np.argsort(-deviation[eligible], kind="stable")
        ranked: Positions = view.candidates[eligible[order]]
        return ranked

    def budget(self, candidates: int) -> int:
        return share(self.fraction, candidates)


def _squared_norm(keys: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[tokens] from [tokens, kv_heads, head_dim], summed in float64."""
    return keys.square().sum(dim=(1, 2), dtype=torch.float64).cpu().numpy()
