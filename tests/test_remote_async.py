"""RemoteChat under asyncio: many at once, several event loops, and calls that are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core import exceptions as langchain
from langchain_core.messages import HumanMessage

from langchain_cacheslide.question import Question
from langchain_cacheslide.remote import RemoteChat

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

ASK = [HumanMessage("one two three four")]
SOON_S = 20.0
ONCE = {"max_retries": 0}
ASKED = Question(ASK, ONCE)


@pytest.fixture
def server(support: Callable[[str], ModuleType]) -> Iterator[OpenAIServer]:
    with support("openai_server").OpenAIServer() as running:
        yield running


@pytest.fixture
def chat(server: OpenAIServer) -> RemoteChat:
    return RemoteChat(server.url)


async def texts(chat: RemoteChat, text: str) -> list[str]:
    return [chunk.text async for chunk in chat.call(Question([HumanMessage(text)], ONCE)).astream()]


def test_async_stream_gives_the_same_pieces(chat: RemoteChat) -> None:
    streamed = [chunk.text for chunk in chat.call(ASKED).stream()]
    assert asyncio.run(texts(chat, "one two three four")) == streamed
    assert streamed == ["one", " two", " three", " four", ""]


def test_twenty_calls_at_once_get_each_its_own_answer(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    async def ask() -> list[str]:
        asked = [
            chat.call(Question([HumanMessage(f"call {i}")], ONCE)).agenerate() for i in range(20)
        ]
        return [result.generations[0].text for result in await asyncio.gather(*asked)]

    async def stream() -> list[str]:
        asked = [texts(chat, f"stream {i} of twenty") for i in range(20)]
        return ["".join(pieces) for pieces in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [f"call {i}" for i in range(20)]
    assert asyncio.run(stream()) == [f"stream {i} of twenty" for i in range(20)]
    assert server.asked("/v1/models") == server.asked("/v1/cacheslide/status") == 1


def test_one_model_serves_event_loops_in_several_threads(chat: RemoteChat) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = pool.map(lambda i: asyncio.run(texts(chat, f"loop {i}")), range(8))
        assert ["".join(pieces) for pieces in asked] == [f"loop {i}" for i in range(8)]


@pytest.mark.parametrize("hold_after", [0, 2])
def test_cancelled_stream_closes_the_connection(
    chat: RemoteChat, server: OpenAIServer, hold_after: int
) -> None:
    server.hold_after = hold_after
    seen: list[str] = []

    async def read() -> None:
        async with aclosing(chat.call(ASKED).astream()) as chunks:
            async for chunk in chunks:
                seen.append(chunk.text)

    async def give_up() -> bool:
        reading = asyncio.create_task(read())
        assert await asyncio.to_thread(server.holding.wait, SOON_S)
        while len(seen) < hold_after:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        return await asyncio.to_thread(server.disconnected.wait, SOON_S)

    assert asyncio.run(give_up())
    assert seen == ["one", " two"][:hold_after]


def test_cancelled_call_closes_the_connection(chat: RemoteChat, server: OpenAIServer) -> None:
    server.hold_after = 0

    async def give_up() -> bool:
        asking = asyncio.create_task(chat.call(ASKED).agenerate())
        assert await asyncio.to_thread(server.holding.wait, SOON_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return await asyncio.to_thread(server.disconnected.wait, SOON_S)

    assert asyncio.run(give_up())


def test_stream_that_is_left_closes_the_connection(chat: RemoteChat, server: OpenAIServer) -> None:
    server.hold_after = 1
    stream: Any = chat.call(ASKED).stream()
    with closing(stream) as chunks:
        assert next(chunks).text == "one"
    assert server.disconnected.wait(SOON_S)


def test_async_failures_are_those_of_the_sync_calls(chat: RemoteChat, server: OpenAIServer) -> None:
    server.die_after = 2
    with pytest.raises(langchain.ModelConnectionError, match="after 2 pieces") as raised:
        asyncio.run(texts(chat, "one two three four"))
    error: Any = raised.value
    assert (error.partial, error.pieces) == ("one two", 2)

    server.die_after, server.die_politely = 2, True
    with pytest.raises(langchain.ModelConnectionError, match="without a finish reason"):
        asyncio.run(texts(chat, "one two three four"))

    server.models = []
    with pytest.raises(langchain.ModelNotFoundError):
        asyncio.run(chat.call(ASKED).agenerate())
