"""What the workers have stored, as the scheduler's side knows it: tokens and chunks, no tensors.

In: contexts as they are ordered to be stored, numbers of those that were lost. Out: contexts by
key, for the planner, and their numbers, for orders.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import ReuseError
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext, TokenRange
from cacheslide_agents.pages.entry import content_of
from cacheslide_agents.policies.base import Plan


class Directory:
    """A `ContextSource` for plans that are made by tokens alone.

    `one_per_session`: the stores keep one context of a named session. One that is to be superseded
    is not planned on while its successor is there; it is again, if that could not be stored.
    """

    def __init__(self, one_per_session: bool = False) -> None:
        self._one_per_session = one_per_session
        self._numbers = count(1)
        self._contexts: dict[int, StoredContext] = {}
        self._number_of: dict[StoredContext, int] = {}
        self._named: dict[Hashable, dict[int, StoredContext]] = {}

    def add(self, context: StoredContext) -> int:
        """Its number, never used before."""
        number = next(self._numbers)
        self._contexts[number] = context
        self._number_of[context] = number
        for name in _names(context):
            self._named.setdefault(name, {})[number] = context
        return number

    def remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            context = self._contexts.pop(number, None)
            if context is None:
                continue
            del self._number_of[context]
            for name in _names(context):
                del self._named[name][number]
                if not self._named[name]:
                    del self._named[name]

    def has(self, numbers: Iterable[int]) -> bool:
        """Whether all of these can be planned on."""
        return all(number in self._contexts and self._is_due(number) for number in numbers)

    def sources(self, plan: Plan) -> tuple[int, ...]:
        """The numbers of the contexts that `plan`'s runs come from, run by run."""
        return tuple(self._number_of[planned.source] for planned in plan.runs)

    def find(self, key: ContextKey, session: str | None = None) -> list[StoredContext]:
        """In-context entries of `key`: those of `session` first, then newest first."""
        numbers = reversed(self._named.get(key, {}))
        found = [self._contexts[number] for number in numbers if self._is_due(number)]
        if session is not None:
            found.sort(key=lambda context: context.session != session)
        return found

    def find_isolated(self, key: ContextKey, ids: npt.NDArray[np.int64]) -> StoredContext | None:
        """The entry of a chunk computed alone with exactly these tokens."""
        copies = self._named.get(content_of(key, True, ids))
        return copies[next(reversed(copies))] if copies else None

    def load(
        self, context: StoredContext, layer: int, ranges: Sequence[TokenRange] | None = None
    ) -> LayerKV:
        """For selectors that look at keys before the prefill starts: there are none here."""
        raise ReuseError(
            "the selector asks for keys, but on vLLM plans are made where only tokens are; "
            "use selectors that look at tokens"
        )

    def _is_due(self, number: int) -> bool:
        """Whether no later context of its session takes its place."""
        context = self._contexts[number]
        if not self._one_per_session or context.session is None or context.isolated:
            return True
        return next(reversed(self._named[context.key, context.session])) == number


def _names(context: StoredContext) -> list[Hashable]:
    """Under what it is looked up: one computed alone by its tokens, others by key and session."""
    key, session = context.key, context.session
    if context.isolated:
        return [content_of(key, True, context.ids)]
    return [key] if session is None else [key, (key, session)]
