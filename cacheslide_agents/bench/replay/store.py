"""Stored contexts of which only the tokens are known: enough to plan with, not to compute with.

In: contexts. Out: the same, by key or by tokens, under a budget of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext, TokenRange

COPIES_PER_CONTENT = 2
"""As the page stores keep them."""


class TokenStore:
    """A `ContextSource`. The least recently used context leaves first when the budget is full.

    Of one named session at most `copies_per_session` contexts are kept. A page store may keep more
    than this one: it shares the blocks that several contexts have in common.
    """

    def __init__(self, budget_tokens: int, copies_per_session: int = 4) -> None:
        self._budget, self._copies = budget_tokens, copies_per_session
        self._contexts: dict[StoredContext, None] = {}  # newest last
        self._used: dict[StoredContext, int] = {}
        self._clock = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self._contexts))

    def put(self, context: StoredContext) -> bool:
        """Keep `context`; false when it cannot fit or holds no token."""
        if not 0 < len(context) <= self._budget:
            return False
        for one in self._superseded_by(context):
            self._drop(one)
        while self.tokens + len(context) > self._budget:
            self._drop(min(self._contexts, key=self._used.__getitem__))
        self._contexts[context] = None
        self.touch(context)
        return True

    def touch(self, context: StoredContext) -> None:
        """A request read from `context`."""
        self._clock += 1
        self._used[context] = self._clock

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]:
        found = [c for c in reversed(self._contexts) if c.key == key and not c.isolated]
        if session is not None:
            found.sort(key=lambda context: context.session != session)
        return found

    def find_isolated(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> StoredContext | None:
        alone = (c for c in reversed(self._contexts) if c.isolated and c.key == key)
        return next((c for c in alone if np.array_equal(c.ids, ids)), None)

    def load(
        self, context: StoredContext, layer: int, ranges: Sequence[TokenRange] | None = None
    ) -> LayerKV:
        raise PageError("a replay knows tokens only; a selector that reads keys cannot be replayed")

    def _superseded_by(self, newcomer: StoredContext) -> list[StoredContext]:
        same_kind = [
            c for c in self._contexts if c.key == newcomer.key and c.isolated == newcomer.isolated
        ]
        copies = [c for c in same_kind if np.array_equal(c.ids, newcomer.ids)]
        going = copies[: max(0, len(copies) - COPIES_PER_CONTENT + 1)]
        if newcomer.session is None:
            return going
        turns = [c for c in same_kind if c.session == newcomer.session and c not in going]
        turns.sort(key=self._used.__getitem__)
        return going + turns[: max(0, len(turns) - self._copies + 1)]

    def _drop(self, context: StoredContext) -> None:
        del self._contexts[context], self._used[context]
