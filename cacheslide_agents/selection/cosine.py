"""Reused tokens whose keys resemble those of the change.

In: position-free keys of one layer. Out: a score for every candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cacheslide_agents.selection.base import SelectionView

_BLOCK = 1024  # candidates compared at a time, which bounds the [block, update] product


@dataclass(frozen=True)
class KeyCosine:
    """Cosine with the key, among the update's new tokens, that a candidate resembles most.

    The cosine is averaged over heads. `layer` counts from 0; the update must have run so far, which
    the planner counts as work. Tokens alike in mid-model are about the same thing.
    """

    layer: int = 14

    def score(self, view: SelectionView) -> npt.NDArray[np.float64]:
        arrived = any(edit.stop > edit.start for edit in view.edits)
        if not arrived or not len(view.candidates):
            return np.zeros(len(view.candidates))
        return _closest(view.cached_keys(self.layer), view.new_keys(self.layer))


def _closest(keys: Tensor, others: Tensor) -> npt.NDArray[np.float64]:
    """[tokens], the largest mean-over-heads cosine of each key with any of `others`.

    Both [tokens, kv_heads, head_dim].
    """
    directions, targets = _directions(keys), _directions(others)
    best = [(block @ targets.T).amax(dim=1) for block in torch.split(directions, _BLOCK)]
    return (torch.cat(best) / keys.shape[1]).double().cpu().numpy()


def _directions(keys: Tensor) -> Tensor:
    """Every head's key at unit length, heads side by side: [tokens, kv_heads * head_dim]."""
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    return normalize(wide, dim=-1).flatten(1)
