"""Servers that drip, so that no wait for the next byte is ever long, and servers that are silent.

What is expected to be late gets `SHORT_S`, what is to reach the server before that `LONGER_S`, and
everything else `AMPLE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core import exceptions as langchain
from langchain_core.messages import HumanMessage

from cacheslide_agents.errors import ServerError
from langchain_cacheslide import remote_server
from langchain_cacheslide.deadline import awhole, awithin
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote import RemoteChat
from langchain_cacheslide.remote_receipt import NO_PLUGIN

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

ASK = [HumanMessage("one two three four")]
CHAT = "/v1/chat/completions"
SHORT_S, LONGER_S, AMPLE_S = 0.1, 4.0, 60.0
Settings = dict[str, Any]
Way = Callable[[RemoteChat, Settings], Any]
WAYS: list[Way] = [
    lambda remote, settings: list(remote.call(Question(ASK, settings)).stream()),
    lambda remote, settings: remote.call(Question(ASK, settings)).generate(),
    lambda remote, settings: asyncio.run(gathered(remote.call(Question(ASK, settings)).astream())),
    lambda remote, settings: asyncio.run(remote.call(Question(ASK, settings)).agenerate()),
]


@pytest.fixture
def server(support: Callable[[str], ModuleType]) -> Iterator[OpenAIServer]:
    with support("openai_server").OpenAIServer() as running:
        yield running


def chat(server: OpenAIServer) -> RemoteChat:
    return RemoteChat(server.url, model="tiny")


def within(timeout: float | None, max_retries: int = 0) -> Settings:
    return {"timeout": timeout, "max_retries": max_retries}


IN_TIME = within(AMPLE_S)
ASKED = Question(ASK, IN_TIME)


def nothing_left_to_do(remote: RemoteChat) -> None:
    """Waits for whatever still goes on behind the calls that were given up."""

    async def wait() -> None:
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    remote._server.loop.result(wait)


async def gathered(stream: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("asked", WAYS)
def test_answer_that_drips_is_given_up_at_the_timeout(server: OpenAIServer, asked: Way) -> None:
    server.drips = (CHAT,)
    with pytest.raises(langchain.ModelTimeoutError, match="took too long; raise timeout") as raised:
        asked(chat(server), within(SHORT_S))
    assert isinstance(raised.value, ServerError)


@pytest.mark.parametrize("asked", WAYS)
def test_answer_that_was_given_up_is_not_asked_for_again(server: OpenAIServer, asked: Way) -> None:
    server.hold_after = 0
    remote = chat(server)
    with pytest.raises(langchain.ModelTimeoutError):
        asked(remote, within(LONGER_S, 2))
    nothing_left_to_do(remote)
    assert server.asked(CHAT) == 1
    assert server.disconnected.wait(AMPLE_S)


def test_retry_that_was_waited_for_at_the_timeout_never_comes(
    server: OpenAIServer, support: Callable[[str], ModuleType]
) -> None:
    busy = support("openai_server").Failure(429, "busy", retry_after_ms=20_000)
    server.failures = [busy] * 3
    remote = chat(server)
    with pytest.raises(langchain.ModelTimeoutError):
        remote.call(Question(ASK, within(LONGER_S, 2))).generate()
    nothing_left_to_do(remote)
    assert server.asked(CHAT) == 1


def test_stream_with_a_timeout_that_is_left_closes_the_connection_at_once(
    server: OpenAIServer,
) -> None:
    server.hold_after = 1
    remote = chat(server)
    stream: Any = remote.call(ASKED).stream()
    with closing(stream) as chunks:
        assert next(chunks).text == "one"
        assert server.holding.wait(AMPLE_S)
    assert server.disconnected.wait(AMPLE_S)
    nothing_left_to_do(remote)


def test_status_that_drips_holds_up_no_answer(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_server, "_ASIDE_S", SHORT_S)
    server.drips = ("/v1/cacheslide/status",)
    remote = chat(server)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: remote.call(ASKED).generate(), range(4)))
    for result in results:
        message = result.generations[0].message
        assert message.content == "one two three four"
        assert message.response_metadata["cacheslide"]["reason"] == NO_PLUGIN
    assert remote.call(ASKED).generate().generations[0].text == "one two three four"
    assert server.asked("/v1/cacheslide/status") == 1


def test_receipt_that_drips_leaves_the_answer_without_one(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status = {"plan_versions": [1]}
    server.drips = ("/v1/cacheslide/receipts/chatcmpl-1",)
    remote = chat(server)
    assert remote.model == "tiny"  # with the server's status, which comes in time
    monkeypatch.setattr(remote_server, "_ASIDE_S", SHORT_S)
    (generation,) = remote.call(ASKED).generate().generations
    assert generation.text == "one two three four"
    assert generation.message.response_metadata["cacheslide"]["policy"] == "server"


def test_names_of_models_that_drip_are_a_timeout_and_asked_for_again(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.drips = ("/v1/models",)
    remote = RemoteChat(server.url)
    with monkeypatch.context() as patched:
        patched.setattr(remote_server, "_NAMES_S", SHORT_S)
        with pytest.raises(langchain.ModelTimeoutError, match="took too long"):
            remote.call(Question(ASK, within(None))).generate()
    nothing_left_to_do(remote)
    server.drips = ()
    assert remote.call(ASKED).generate().generations[0].text == "one two three four"


def test_error_of_the_one_asked_is_not_taken_for_the_deadline() -> None:
    async def fails() -> str:
        raise TimeoutError("its own")

    async def pieces() -> AsyncGenerator[str, None]:
        yield await fails()

    for seconds in (None, AMPLE_S):
        with pytest.raises(TimeoutError, match="its own"):
            asyncio.run(awhole(fails, seconds))
        with pytest.raises(TimeoutError, match="its own"):
            asyncio.run(gathered(awithin(pieces, seconds)))
