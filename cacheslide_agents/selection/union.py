"""Several selectors at once.

In: selectors. Out: the positions that any of them chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection.base import Positions, SelectionView, Selector


@dataclass(frozen=True, init=False)
class Union:
    """`Union(a, b, ...)`: what `a` or `b` or ... selects. Their budgets add up.

    Layer selectors cannot take part: they choose in the middle of the forward pass.
    """

    selectors: tuple[Selector, ...]

    def __init__(self, *selectors: Selector) -> None:
        for selector in selectors:
            if not isinstance(selector, Selector):
                raise RequestError(
                    f"Union cannot hold {selector!r}: it does not choose before the forward pass"
                )
        object.__setattr__(self, "selectors", selectors)

    def select(self, view: SelectionView) -> Positions:
        chosen = np.zeros(len(view.ids), dtype=np.bool_)
        for selector in self.selectors:
            chosen[selector.select(view)] = True
        return np.flatnonzero(chosen)
