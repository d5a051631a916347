"""The tokens after a place where text was taken out.

In: the edits of one request. Out: reused positions right behind every edit that removed text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection.base import Positions, SelectionView


@dataclass(frozen=True)
class AfterRemoval:
    """Recompute up to `tokens` tokens after every edit that left the prompt shorter there.

    Text that is gone cannot be found by its words, but what stood right behind it attended to it
    most. An edit that took away r tokens more than it brought gives min(r, `tokens`) correction
    tokens; one that brought as much or more gives none. Ours; figures in docs/decisions.md.
    """

    tokens: int = 64

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise RequestError(f"AfterRemoval(tokens={self.tokens!r}) must be at least 0")

    def select(self, view: SelectionView) -> Positions:
        chosen = np.zeros(len(view.ids), dtype=np.bool_)
        for edit in view.edits:
            removed = (edit.cached_stop - edit.cached_start) - (edit.stop - edit.start)
            chosen[edit.stop : edit.stop + max(0, min(removed, self.tokens))] = True
        return view.candidates[chosen[view.candidates]]
