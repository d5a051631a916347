"""Answers that must be whole by a certain time.

In: a stream or a question, and a number of seconds. Out: the same stream, or the answer, which ends
with `RequestTimeoutError` when they have passed. A coroutine is then cancelled, with the connection
it reads and the tries it has left; a generator that computes is closed after its next item.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

from cacheslide_agents.errors import RequestTimeoutError

T = TypeVar("T")
_END = object()
_NAME = "cacheslide-deadline"


async def awhole(ask: Callable[[], Awaitable[T]], seconds: float | None) -> T:
    """What `ask()` returns."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await ask()
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestTimeoutError(seconds or 0.0) from None


def within(
    start: Callable[[], Generator[T, None, None]], seconds: float | None
) -> Generator[T, None, None]:
    """What `start()` yields. Its generator is closed with this one, or at its next item then."""
    if seconds is not None:
        yield from _watched(start, seconds)
        return
    with closing(start()) as stream:
        yield from stream


async def awithin(
    start: Callable[[], AsyncGenerator[T, None]], seconds: float | None
) -> AsyncGenerator[T, None]:
    """The same for asyncio."""
    deadline = None if seconds is None else monotonic() + seconds
    async with aclosing(start()) as stream:
        while True:
            left = None if deadline is None else deadline - monotonic()
            try:
                async with asyncio.timeout(left) as limit:
                    item = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not limit.expired():  # the stream's own
                    raise
                raise RequestTimeoutError(seconds or 0.0) from None
            yield item


def _watched(
    start: Callable[[], Generator[T, None, None]], seconds: float
) -> Generator[T, None, None]:
    """A thread waits in our place, for a generator that computes cannot be closed from outside."""
    queue: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    left = Event()
    Thread(target=_pump, args=(start, queue, left), name=_NAME, daemon=True).start()
    deadline = monotonic() + seconds
    try:
        while True:
            try:
                item, error = queue.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                raise RequestTimeoutError(seconds) from None
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        left.set()


def _pump(
    start: Callable[[], Generator[Any, None, None]], queue: SimpleQueue[Any], left: Event
) -> None:
    try:
        with closing(start()) as stream:
            for item in stream:
                queue.put((item, None))
                if left.is_set():
                    return
        queue.put((_END, None))
    except BaseException as error:  # whatever it is belongs to the caller's thread
        queue.put((None, error))
