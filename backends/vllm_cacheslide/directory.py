"""What the workers have stored, as the scheduler's side knows it: tokens and chunks, no tensors.

In: contexts as they are ordered to be stored, numbers of those that were lost. Out: contexts by
key, for the planner, and their numbers, for orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import ReuseError
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext
from cacheslide_agents.policies.base import Plan


class Directory:
    """A `ContextSource` for plans that are made by tokens alone.

    `one_per_session`: the stores keep one context of a named session, so one that is about to be
    superseded is not planned on any more.
    """

    def __init__(self, one_per_session: bool = False) -> None:
        self._one_per_session = one_per_session
        self._numbers = count(1)
        self._contexts: dict[int, StoredContext] = {}
        self._number_of: dict[StoredContext, int] = {}

    def add(self, context: StoredContext) -> int:
        """Its number, never used before."""
        self.remove(self._superseded_by(context))
        number = next(self._numbers)
        self._contexts[number] = context
        self._number_of[context] = number
        return number

    def remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            context = self._contexts.pop(number, None)
            if context is not None:
                del self._number_of[context]

    def sources(self, plan: Plan) -> tuple[int, ...]:
        """The numbers of the contexts that `plan`'s runs come from, run by run."""
        return tuple(self._number_of[planned.source] for planned in plan.runs)

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]:
        """In-context entries of `key`: those of `session` first, then newest first."""
        found = [
            context
            for context in reversed(self._contexts.values())
            if context.key == key and not context.isolated
        ]
        if session is not None:
            found.sort(key=lambda context: context.session != session)
        return found

    def find_isolated(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> StoredContext | None:
        """The entry of a chunk computed alone with exactly these tokens."""
        for context in reversed(self._contexts.values()):
            if context.isolated and context.key == key and np.array_equal(context.ids, ids):
                return context
        return None

    def load(self, context: StoredContext, layer: int) -> LayerKV:
        """For selectors that look at keys before the prefill starts: there are none here."""
        raise ReuseError(
            "the selector asks for keys, but on vLLM plans are made where only tokens are; "
            "use selectors that look at tokens"
        )

    def _superseded_by(self, context: StoredContext) -> list[int]:
        """Numbers of its session's earlier contexts, where the stores will drop them."""
        if not self._one_per_session or context.session is None or context.isolated:
            return []
        return [
            number
            for number, other in self._contexts.items()
            if other.key == context.key and other.session == context.session and not other.isolated
        ]
