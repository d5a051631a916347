"""What a selector sees and must answer.

In: a `SelectionView` of one request (tokens, runs, edits, lazily the keys). Out: the ascending
prompt positions of the hit tokens that are recomputed all the same, the correction tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cacheslide_agents.chunks import Edit, Run

Positions = npt.NDArray[np.int64]
LayerKeys = Callable[[int], Tensor]


def run_mask(runs: Sequence[Run], length: int) -> npt.NDArray[np.bool_]:
    """[length], true inside a run."""
    mask = np.zeros(length, dtype=np.bool_)
    for run in runs:
        mask[run.start : run.stop] = True
    return mask


@dataclass(frozen=True)
class SelectionView:
    """One request as selectors see it.

    `ids` [n] are the prompt's tokens; `cached_ids` those of the cached context (empty for isolated
    chunk caches). `runs` are the reused runs, `edits` what lies between them. Keys are
    position-free, float, shaped [tokens, kv_heads, head_dim]: `cached_keys(layer)` for `candidates`
    in order, `removed_keys(layer)` for the cached tokens that vanished, `new_keys(layer)` for the
    update tokens in order (this one runs the update through the first layers; the planner counts
    that cost).
    """

    ids: Positions
    cached_ids: Positions
    runs: tuple[Run, ...]
    edits: tuple[Edit, ...]
    cached_keys: LayerKeys
    removed_keys: LayerKeys
    new_keys: LayerKeys

    @cached_property
    def hit(self) -> npt.NDArray[np.bool_]:
        """[n], true where a token is reused."""
        return run_mask(self.runs, len(self.ids))

    @cached_property
    def first_change(self) -> int:
        """The first prompt position whose left context differs from the cached one."""
        return self.edits[0].start if self.edits else len(self.ids)

    @cached_property
    def candidates(self) -> Positions:
        """Hit positions after the first change, ascending; the last prompt token is never one."""
        after = np.flatnonzero(self.hit)
        return after[(after >= self.first_change) & (after < len(self.ids) - 1)]


@runtime_checkable
class Selector(Protocol):
    """Chooses correction tokens before the forward pass starts."""

    def select(self, view: SelectionView) -> Positions: ...


@runtime_checkable
class LayerSelector(Protocol):
    """Chooses after looking at freshly computed keys: layers 0..`layer` run for every token.

    `new_keys` and `cached_keys` are position-free [candidates, kv_heads, head_dim] at `layer`.
    """

    @property
    def layer(self) -> int: ...

    def rank(self, view: SelectionView, new_keys: Tensor, cached_keys: Tensor) -> Positions:
        """All eligible candidates, best first (the order promotions follow)."""
        ...

    def budget(self, candidates: int) -> int:
        """How many of the ranked candidates are corrected."""
        ...
