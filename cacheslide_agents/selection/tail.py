"""The last tokens of the prompt, right before the answer.

In: one request. Out: those of its last positions that are reused.
"""

from __future__ import annotations

from dataclasses import dataclass

from cacheslide_agents.errors import RequestError
from cacheslide_agents.selection.base import Positions, SelectionView


@dataclass(frozen=True)
class Tail:
    """Recompute what is reused of the last `tokens` tokens of the prompt.

    The answer attends to them most, and between them and where they were cached often stands the
    whole new exchange: a closing cue that was computed before it never saw it. Ours; figures in
    docs/decisions.md.
    """

    tokens: int = 64

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise RequestError(f"Tail(tokens={self.tokens!r}) must be at least 0")

    def select(self, view: SelectionView) -> Positions:
        return view.candidates[view.candidates >= len(view.ids) - self.tokens]
