"""A whole answer, gathered from the pieces in which it comes.

In: a request that asks for one answer. Out: its text, its tokens and when they came, its receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

from cacheslide_agents.backend import (
    Backend,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Receipt,
)
from cacheslide_agents.errors import BackendError


@dataclass(frozen=True, slots=True)
class Answered:
    """`times_s`: when each token came, in seconds since the clock was started."""

    text: str
    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    finish_reason: FinishReason
    receipt: Receipt

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]


class Pieces:
    """Those of one answer. `started`: when its clock was, by `perf_counter` (default: now)."""

    def __init__(self, started: float | None = None) -> None:
        self._started = perf_counter() if started is None else started
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._times: list[float] = []
        self._last: GenerationChunk | None = None

    def add(self, piece: GenerationChunk) -> None:
        """The next one, which came just now."""
        self._times += [perf_counter() - self._started] * len(piece.token_ids)
        self._ids += piece.token_ids
        self._texts.append(piece.text)
        self._last = piece

    def whole(self, name: str) -> Answered:
        """All of them. `BackendError`, which says `name`, if the answer ended before its end."""
        last = self._last
        if last is None or last.finish_reason is None or last.receipt is None or not self._ids:
            raise BackendError(f"{name}: an answer ended without token or receipt")
        ids, times = tuple(self._ids), tuple(self._times)
        return Answered("".join(self._texts), ids, times, last.finish_reason, last.receipt)


def answered(
    backend: Backend,
    request: GenerationRequest,
    *,
    started: float | None = None,
    write: Callable[[str], None] | None = None,
) -> Answered:
    """The answer, once it is whole; `write` gets its text as it comes.

    Whatever interrupts this stops the backend. `BackendError` for an answer without an end.
    """
    pieces = Pieces(started)
    with closing(backend.generate(request)) as stream:
        for piece in stream:
            pieces.add(piece)
            if write is not None:
                write(piece.text)
    return pieces.whole(backend.model_id)
