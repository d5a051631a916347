"""Reused tokens that repeat the words that changed.

In: tokens and edits of one request. Out: a score for every candidate; needs no keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection.base import Positions, SelectionView


@dataclass(frozen=True)
class TokenOverlap:
    """A candidate that is a changed word scores 1 / (its count in the prompt) ** `rarity`.

    Changed words, edit by edit: in the new text and not the old, or the reverse; so all of the new
    text where something was inserted, all of the old where something was removed. Names score high,
    spaces and punctuation low. Each token also takes `spread` of the score of either neighbour:
    what stands beside a repeated name speaks of it, and a name of several tokens strengthens
    itself. Ours; see docs/decisions.md for the measurements.
    """

    spread: float = 0.5
    rarity: float = 1.0

    def __post_init__(self) -> None:
        for name in ("spread", "rarity"):
            if not getattr(self, name) >= 0:
                raise RequestError(f"TokenOverlap({name}={getattr(self, name)!r}) must be >= 0")

    def score(self, view: SelectionView) -> npt.NDArray[np.float64]:
        candidates = view.candidates
        words = changed_words(view)
        if not len(candidates) or not len(words):
            return np.zeros(len(candidates))
        weights = np.zeros(max(view.ids.max(), words[-1]) + 1)
        weights[words] = 1.0
        counts = np.bincount(view.ids, minlength=len(weights))
        weights /= np.maximum(counts, 1) ** self.rarity
        padded = np.zeros(len(view.ids) + 2)
        padded[candidates + 1] = weights[view.ids[candidates]]
        beside = padded[candidates] + padded[candidates + 2]
        return padded[candidates + 1] + self.spread * beside


def changed_words(view: SelectionView) -> Positions:
    """The token ids, ascending, that any edit brought or took away."""
    if not view.edits:
        return np.empty(0, dtype=np.int64)
    borders = np.array([(e.start, e.stop, e.cached_start, e.cached_stop) for e in view.edits])
    borders[:, 2:] = np.minimum(borders[:, 2:], len(view.cached_ids))
    brought = _per_edit(view.ids, borders[:, 0], borders[:, 1])
    gone = _per_edit(view.cached_ids, borders[:, 2], borders[:, 3])
    words: Positions = np.unique(np.setxor1d(brought, gone) & 0xFFFFFFFF)
    return words


def _per_edit(ids: Positions, starts: Positions, stops: Positions) -> Positions:
    """The tokens of all ranges [start, stop), each with its range's index in the upper 32 bits."""
    lengths = stops - starts
    edits = np.repeat(np.arange(len(lengths)), lengths)
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(len(edits)) - firsts[edits] + starts[edits]
    marked: Positions = (edits << 32) | ids[places]
    return marked
