"""How long a caller waits, and questions that several callers wait for at once.

In: the settings of a call; a coroutine. Out: its `Patience`; what the coroutine gives, to all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, Self, TypeVar

from langchain_cacheslide.loop_thread import LoopThread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """`timeout`: seconds for a question, `None` for no limit. `max_retries`: tries after the first.

    It belongs to a call and not to a server, so it tells no two servers apart.
    """

    timeout: float | None = None
    max_retries: int = 2

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """That of a call; what its settings leave out is as above."""
        retries = settings.get("max_retries")
        return cls(settings.get("timeout"), **({} if retries is None else {"max_retries": retries}))


class SharedQuestion(Generic[T]):
    """Asked once for all callers of one time. Safe to call from several threads.

    Whatever came of it, and if a caller left early, the next one asks anew.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._lock = Lock()  # never held while a server is asked
        self._asked: Future[T] | None = None

    def answer(self, ask: Callable[[], Awaitable[T]], seconds: float | None) -> T:
        """`TimeoutError` after `seconds`; the question goes on, for others may wait for it."""
        with self._lock:
            if self._asked is None:
                self._asked = self._loop.start(ask)
            asked = self._asked
        try:
            return asked.result(seconds)
        finally:
            with self._lock:
                self._asked = None if self._asked is asked else self._asked
