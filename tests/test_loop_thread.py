"""The event loop of callers who have none: results, items, giving up, and its own end."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from langchain_cacheslide.loop_thread import LoopThread

SOON_S = 60.0


async def counted(ended: threading.Event, stop: int | None = None) -> AsyncGenerator[int, None]:
    """0, 1, ... up to `stop`, or 0 and then nothing for ever."""
    try:
        for number in range(1 if stop is None else stop):
            yield number
        if stop is None:
            await asyncio.Event().wait()
    finally:
        ended.set()


def test_items_come_in_order_and_the_stream_is_closed() -> None:
    ended = threading.Event()
    assert list(LoopThread().items(lambda: counted(ended, 5))) == [0, 1, 2, 3, 4]
    assert ended.is_set()


def test_error_comes_after_the_items_before_it() -> None:
    async def fails() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("its own")

    seen: list[int] = []
    with pytest.raises(ValueError, match="its own"):
        for item in LoopThread().items(fails):
            seen.append(item)
    assert seen == [1]


def test_closing_cancels_what_waits_for_the_next_item() -> None:
    ended = threading.Event()
    with closing(LoopThread().items(lambda: counted(ended))) as items:
        assert next(items) == 0
        assert not ended.is_set()
    assert ended.wait(SOON_S)


def test_cancelled_future_cancels_its_task() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def ask() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = LoopThread().start(ask)
    assert begun.wait(SOON_S)
    future.cancel()
    assert ended.wait(SOON_S)


def test_callers_of_several_threads_share_one_loop() -> None:
    loop = LoopThread()

    async def ask() -> tuple[int, int]:
        return id(asyncio.get_running_loop()), threading.get_ident()

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: loop.result(ask), range(16)))
    assert len(found) == 1
    assert threading.get_ident() not in {thread for _, thread in found}


def test_thread_ends_with_the_last_who_holds_the_loop() -> None:
    async def here() -> threading.Thread:
        return threading.current_thread()

    loop = LoopThread()
    thread = loop.result(here)
    assert thread.is_alive()
    del loop
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_has_a_loop_of_its_own() -> None:
    async def ask() -> int:
        return os.getpid()

    loop = LoopThread()
    assert loop.result(ask) == os.getpid()
    child = os.fork()
    if not child:
        os._exit(0 if loop.start(ask).result(SOON_S) == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
