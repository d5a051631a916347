"""A promise that stored contexts stay while a request uses them.

In: contexts and what ends the promise. Out: a context manager that ends it once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from cacheslide_agents.pages.base import StoredContext


class Lease:
    """Holds `contexts` from its making until `release`, or the end of its `with` block."""

    def __init__(self, contexts: tuple[StoredContext, ...], end: Callable[[Lease], None]) -> None:
        self.contexts = contexts
        self._end: Callable[[Lease], None] | None = end

    def release(self) -> None:
        """End it; safe to call twice."""
        end, self._end = self._end, None
        if end is not None:
            end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
