"""Servers that drip: bytes keep coming, so that no wait for the next one is ever long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core import exceptions as langchain
from langchain_core.messages import HumanMessage

from cacheslide_agents.errors import RequestTimeoutError, ServerError
from langchain_cacheslide.deadline import Question, awhole, awithin, whole
from langchain_cacheslide.remote import RemoteChat
from langchain_cacheslide.remote_receipt import NO_PLUGIN

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

ASK = [HumanMessage("one two three four")]
CHAT = "/v1/chat/completions"


@pytest.fixture
def server(support: Callable[[str], ModuleType]) -> Iterator[OpenAIServer]:
    with support("openai_server").OpenAIServer() as running:
        yield running


def chat(server: OpenAIServer, model: str | None = "tiny") -> RemoteChat:
    return RemoteChat(server.url, model=model, timeout=0.3, max_retries=0)


async def gathered(stream: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in stream]


@pytest.mark.parametrize(
    "asked",
    [
        lambda remote: list(remote.stream(ASK, {})),
        lambda remote: remote.generate(ASK, {}),
        lambda remote: asyncio.run(gathered(remote.astream(ASK, {}))),
        lambda remote: asyncio.run(remote.agenerate(ASK, {})),
    ],
)
def test_answer_that_drips_is_given_up_at_the_timeout(
    server: OpenAIServer, asked: Callable[[RemoteChat], Any]
) -> None:
    server.drips = (CHAT,)
    with pytest.raises(langchain.ModelTimeoutError, match="took too long; raise timeout") as raised:
        asked(chat(server))
    assert isinstance(raised.value, ServerError)
    assert server.asked(CHAT) == 1


def test_status_that_drips_holds_up_no_answer(server: OpenAIServer) -> None:
    server.drips = ("/v1/cacheslide/status",)
    remote = chat(server)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: remote.generate(ASK, {}), range(4)))
    for result in results:
        message = result.generations[0].message
        assert message.content == "one two three four"
        assert message.response_metadata["cacheslide"]["reason"] == NO_PLUGIN
    assert remote.generate(ASK, {}).generations[0].text == "one two three four"
    assert server.asked("/v1/cacheslide/status") == 1


def test_receipt_that_drips_leaves_the_answer_without_one(server: OpenAIServer) -> None:
    server.status = {"plan_versions": [1]}
    server.drips = ("/v1/cacheslide/receipts/chatcmpl-1",)
    (generation,) = chat(server).generate(ASK, {}).generations
    assert generation.text == "one two three four"
    assert generation.message.response_metadata["cacheslide"]["policy"] == "server"


def test_names_of_models_that_drip_are_a_timeout_and_asked_for_again(server: OpenAIServer) -> None:
    server.drips = ("/v1/models",)
    remote = chat(server, model=None)
    with pytest.raises(langchain.ModelTimeoutError, match="took too long"):
        remote.generate(ASK, {})
    server.drips = ()
    assert remote.generate(ASK, {}).generations[0].text == "one two three four"


def test_question_is_asked_once_however_many_wait() -> None:
    asked, go = [], threading.Event()

    def ask() -> str:
        asked.append(True)
        go.wait()
        return "yes"

    question = Question(ask, 60.0)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(question.answer) for _ in range(3)]
        go.set()
        assert [each.result() for each in waiting] == ["yes"] * 3
    assert len(asked) == 1


def test_error_of_the_one_asked_is_not_taken_for_the_deadline() -> None:
    def fails() -> str:
        raise TimeoutError("its own")

    async def afails() -> str:
        return fails()

    async def pieces() -> AsyncIterator[str]:
        yield fails()

    for seconds in (None, 60.0):
        with pytest.raises(TimeoutError, match="its own"):
            whole(fails, seconds)
        with pytest.raises(TimeoutError, match="its own"):
            asyncio.run(awhole(afails, seconds))
        with pytest.raises(TimeoutError, match="its own"):
            asyncio.run(gathered(awithin(pieces, seconds)))


def test_what_is_never_answered_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(RequestTimeoutError) as raised:
        whole(never.wait, 0.01)
    assert raised.value.seconds == 0.01
    never.set()
