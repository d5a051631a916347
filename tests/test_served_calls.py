"""ChatCacheSlide before a server: what a call says for itself, and what it shares with others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

import openai
import pytest
from langchain_core import exceptions as langchain
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    ToolMessage,
)

from cacheslide_agents.errors import RequestError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.remote_question import Patience
from langchain_cacheslide.remote_receipt import NO_PLUGIN
from langchain_cacheslide.remote_server import Server

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

SHORT_S, AMPLE_S = 0.2, 60.0
CHAT = "/v1/chat/completions"
THREE = "n=3 answers cannot be streamed"


@pytest.fixture
def server(support: Callable[[str], ModuleType]) -> Iterator[OpenAIServer]:
    with support("openai_server").OpenAIServer() as running:
        yield running


@pytest.fixture
def chat(server: OpenAIServer) -> ChatCacheSlide:
    return ChatCacheSlide(base_url=server.url)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that hold connections of their own, and not views of them."""
    made: list[Any] = []

    class Kept(openai.AsyncOpenAI):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            if given.get("http_client") is None:
                made.append(self)

    monkeypatch.setattr(openai, "AsyncOpenAI", Kept)
    return made


def loop_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "cacheslide-loop"}


async def gathered(stream: Any) -> str:
    return "".join([piece.text async for piece in stream])


def test_calls_of_different_patience_share_client_thread_and_status(
    chat: ChatCacheSlide, server: OpenAIServer, clients: list[Any]
) -> None:
    before = loop_threads()
    for seconds in range(50, 56):
        assert chat.invoke("Go", timeout=seconds / 3, max_retries=seconds).content == "Go"
    assert len(loop_threads() - before) == 1
    assert len(clients) == 1
    assert server.asked("/v1/models") == server.asked("/v1/cacheslide/status") == 1


@pytest.mark.parametrize("seconds", [SHORT_S, 2 * SHORT_S])
def test_timeout_of_a_call_is_its_own(
    chat: ChatCacheSlide, server: OpenAIServer, seconds: float
) -> None:
    assert chat.invoke("Go", timeout=AMPLE_S).content == "Go"
    server.drips, started = (CHAT,), time.monotonic()
    with pytest.raises(langchain.ModelTimeoutError, match="raise timeout"):
        chat.invoke("Go", timeout=seconds)
    with pytest.raises(langchain.ModelTimeoutError, match="raise timeout"):
        next(chat.stream("Go", timeout=seconds))
    assert time.monotonic() - started < AMPLE_S / 2
    server.drips = ()
    assert chat.invoke("Go", timeout=AMPLE_S).content == "Go"


def test_retries_of_a_call_are_its_own(
    chat: ChatCacheSlide, server: OpenAIServer, support: Callable[[str], ModuleType]
) -> None:
    busy = support("openai_server").Failure(429, "busy", retry_after_ms=1)
    for retries, tries in ((0, 1), (2, 3), (0, 1)):
        server.failures, before = [busy] * 9, server.asked(CHAT)
        with pytest.raises(langchain.ModelRateLimitError):
            chat.invoke("Go", max_retries=retries)
        assert server.asked(CHAT) - before == tries


def test_caller_with_more_time_asks_again_for_names_that_another_gave_up(
    server: OpenAIServer,
) -> None:
    told, server.late = Server(server.url, None, None), ("/v1/models",)
    with ThreadPoolExecutor(2) as pool:
        hasty = pool.submit(told.facts, Patience(2 * SHORT_S))
        assert server.holding.wait(AMPLE_S)
        server.late = ()
        calm = pool.submit(told.facts, Patience(AMPLE_S))
        with pytest.raises(langchain.ModelTimeoutError):
            hasty.result()
        assert calm.result().model == "tiny"
    assert server.asked("/v1/models") == 2


def test_caller_in_haste_leaves_the_status_to_the_others(server: OpenAIServer) -> None:
    told, server.late = Server(server.url, None, "tiny"), ("/v1/cacheslide/status",)
    server.status = {"plan_versions": [1]}
    assert told.facts(Patience(SHORT_S)).reason == NO_PLUGIN
    server.released.set()
    assert told.facts(Patience()).reason == ""


@pytest.fixture(params=["local", "served"])
def anywhere(request: pytest.FixtureRequest, support: Callable[[str], ModuleType]) -> Any:
    if request.param == "local":
        return ChatCacheSlide(backend=support("fake_backend").FakeBackend())
    return request.getfixturevalue("chat")


def test_n_that_is_none_is_not_given(anywhere: ChatCacheSlide) -> None:
    assert anywhere.invoke("Go on", n=None).content == "Go on"
    assert "".join(piece.text for piece in anywhere.stream("Go on", n=None)) == "Go on"
    assert asyncio.run(gathered(anywhere.astream("Go on", n=None))) == "Go on"


@pytest.mark.parametrize(("own", "given"), [(1, {"n": 3}), (3, {}), (3, {"n": None})])
def test_several_answers_are_not_streamed(
    anywhere: ChatCacheSlide, own: int, given: dict[str, Any]
) -> None:
    chat = anywhere.model_copy(update={"n": own})
    with pytest.raises(RequestError, match=THREE):
        next(chat.stream("Go", **given))
    with pytest.raises(RequestError, match=THREE):
        asyncio.run(gathered(chat.astream("Go", **given)))


def add(x: int, y: int) -> int:
    """Adds."""
    return x + y


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("any", "required"),
        ("required", "required"),
        (True, "required"),
        (False, "auto"),
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("add", {"type": "function", "function": {"name": "add"}}),
        ({"type": "function", "function": {"name": "add"}},) * 2,
    ],
)
def test_tool_choice_is_said_in_openais_words(
    chat: ChatCacheSlide, server: OpenAIServer, choice: Any, sent: Any
) -> None:
    chat.bind_tools([add], tool_choice=choice).invoke("Go")
    (body,) = server.bodies()
    assert body["tool_choice"] == sent
    assert body["tools"][0]["function"]["name"] == "add"
    assert set(body["tools"][0]["function"]["parameters"]["properties"]) == {"x", "y"}


def test_tool_choice_that_names_no_tool_is_refused(
    chat: ChatCacheSlide, server: OpenAIServer
) -> None:
    with pytest.raises(RequestError, match=r"tool_choice='sub' names no bound tool.*any.*, add"):
        chat.bind_tools([add], tool_choice="sub")
    chat.invoke("Go", tool_choice="auto")
    assert "tool_choice" not in server.bodies()[0]


@pytest.mark.parametrize(
    "result",
    [
        ToolMessage("broken", tool_call_id="c1", status="error"),
        ToolMessage(["bro", "ken"], tool_call_id="c1", status="error"),
        FunctionMessage(content="4", name="add"),
    ],
)
def test_plan_is_for_the_text_that_is_sent(
    chat: ChatCacheSlide, server: OpenAIServer, result: BaseMessage
) -> None:
    server.status = {"plan_versions": [1]}
    chat.invoke([HumanMessage("Go"), AIMessage("Well."), result])
    assert len(server.plans) == len(server.bodies()) == 1
