"""What one thread makes, handed to a consumer in another thread or on an event loop.

In: work that sends items to a sink, `End` last. Out: the items one by one, then the end or the
error. A consumer that goes away calls the work off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

Sink = Callable[[Any], None]
CallOff = Callable[[], None]
Start = Callable[[Sink], CallOff]
"""Begins work that sends its items to the sink, from any thread; what it returns calls it off."""


@dataclass(frozen=True)
class End:
    """Nothing more will come, and why, if something went wrong."""

    error: BaseException | None = None


def piped(start: Start) -> Generator[Any, None, None]:
    """The items of `start`, which is called when the first one is asked for. Raises its error."""
    items: SimpleQueue[Any] = SimpleQueue()
    call_off = start(items.put)
    try:
        while not isinstance(item := items.get(), End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        call_off()


async def apiped(start: Start) -> AsyncGenerator[Any, None]:
    """The same for asyncio; cancelling the task calls the work off."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Any] = asyncio.Queue()

    def sink(item: object) -> None:
        loop.call_soon_threadsafe(items.put_nowait, item)

    call_off = start(sink)
    try:
        while not isinstance(item := await items.get(), End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        call_off()


def send(sink: Sink, item: object) -> bool:
    """False where the consumer's event loop is gone."""
    try:
        sink(item)
    except RuntimeError:
        return False
    return True
