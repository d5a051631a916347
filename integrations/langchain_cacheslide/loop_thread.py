"""An event loop for callers who have none: what it is asked for can be given up at any moment.

In: coroutines and asynchronous streams. Out: their results and items, in the caller's own thread. A
thread that waits for a socket cannot be stopped from outside; a task can, with its connection and
the tries it would still make.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import aclosing
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar
from weakref import finalize

T = TypeVar("T")
_NAME = "cacheslide-loop"


class LoopThread:
    """Started by the first question, stopped when nobody holds it and nothing runs any more.

    Safe to call from several threads, and in a process that was forked since.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None

    def start(self, ask: Callable[[], Awaitable[T]]) -> Future[T]:
        """Ask, and do not wait; cancelling the future cancels the task."""
        return asyncio.run_coroutine_threadsafe(self._asked(ask), self._running())

    def result(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask()` gives or raises. A caller who is interrupted takes the task along."""
        future = self.start(ask)
        try:
            return future.result()
        finally:
            future.cancel()

    def items(self, start: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """What `start()` yields, read ahead. Closing this generator cancels the reading."""
        queue: SimpleQueue[tuple[T] | None] = SimpleQueue()

        async def read() -> None:
            async with aclosing(start()) as stream:
                async for item in stream:
                    queue.put((item,))

        future = self.start(read)
        future.add_done_callback(lambda _: queue.put(None))
        try:
            while (item := queue.get()) is not None:
                yield item[0]
            future.result()
        finally:
            future.cancel()

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """A method, so that the loop lives as long as its tasks."""
        return await ask()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A fork copies the loop, but not its thread.
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                self._loop = runner.get_loop()
                self._thread = Thread(target=_run, args=(runner,), name=_NAME, daemon=True)
                self._thread.start()
                finalize(self, _stop, self._loop).atexit = False
            return self._loop


def _run(runner: asyncio.Runner) -> None:
    with runner:
        runner.get_loop().run_forever()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
