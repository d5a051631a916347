"""Items from a thread to whoever waits for them: to the end or the error, or called off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from threading import Thread
from typing import Any

import pytest

from cacheslide_agents.streams import CallOff, End, Sink, Start, apiped, piped, send


class Work:
    """Sends `items` from a thread of its own; counts how often it began and was called off."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.began = self.called_off = 0

    def __call__(self, sink: Sink) -> CallOff:
        self.began += 1
        Thread(target=lambda: [send(sink, item) for item in self.items]).start()
        return self._call_off

    def _call_off(self) -> None:
        self.called_off += 1


async def collected(start: Start) -> list[Any]:
    return [item async for item in apiped(start)]


Collect = Callable[[Start], list[Any]]
WAYS: dict[str, Collect] = {
    "piped": lambda start: list(piped(start)),
    "apiped": lambda start: asyncio.run(collected(start)),
}


@pytest.mark.parametrize("collect", WAYS.values(), ids=WAYS)
def test_items_come_in_order_until_the_end(collect: Collect) -> None:
    work = Work(1, None, "three", End(), "too late")
    assert collect(work) == [1, None, "three"]
    assert (work.began, work.called_off) == (1, 1)


@pytest.mark.parametrize("collect", WAYS.values(), ids=WAYS)
def test_an_error_at_the_end_is_the_consumers(collect: Collect) -> None:
    work = Work(1, End(ValueError("no luck")))
    with pytest.raises(ValueError, match="no luck"):
        collect(work)
    assert work.called_off == 1


def test_work_begins_with_the_first_item_and_closing_calls_it_off() -> None:
    work = Work(1, 2)
    items = piped(work)
    assert work.began == 0
    assert next(items) == 1
    assert work.called_off == 0
    items.close()
    assert work.called_off == 1


async def test_leaving_an_asynchronous_stream_calls_its_work_off() -> None:
    work = Work(1, 2)
    async with aclosing(apiped(work)) as items:
        assert await anext(items) == 1
    assert work.called_off == 1


async def test_a_cancelled_task_calls_its_work_off() -> None:
    work = Work(1)
    task = asyncio.create_task(collected(work))
    while not work.began:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.called_off == 1


def test_a_consumer_whose_event_loop_is_gone_is_told_apart() -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    def sink(item: Any) -> None:
        loop.call_soon_threadsafe(print, item)

    assert not send(sink, "lost")
    taken: list[str] = []
    assert send(taken.append, "there")
    assert taken == ["there"]
