"""The agent middleware: hints are for the session and namespace that the calls themselves name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from cacheslide_agents.errors import BackendError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.hints import SessionHints, in_session
from langchain_cacheslide.middleware import CacheSlideMiddleware

CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bergen"}}\n</tool_call>'
ASKED: Any = {"messages": [HumanMessage("What is the weather in Bergen?")]}
THREAD: Any = {"configurable": {"thread_id": "t1"}}


@tool
def weather(town: str) -> str:
    """The weather of a town."""
    return f"It rains in {town}."


class Names(AgentMiddleware[Any, Any, Any]):
    """Gives each model call the next of `settings`."""

    def __init__(self, *settings: dict[str, Any]) -> None:
        super().__init__()
        self.left = list(settings)

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings=self.left.pop(0)))


@pytest.fixture
def hinting(support: Callable[[str], ModuleType]) -> Callable[..., Any]:
    support("fake_backend")
    made: Callable[..., Any] = support("hinting_backend").HintingBackend
    return made


def play(model: Any, *settings: dict[str, Any]) -> None:
    middleware = [Names(*settings), CacheSlideMiddleware()]
    given: Any = {"middleware": middleware[0 if settings else 1 :], "checkpointer": InMemorySaver()}
    create_agent(model, [weather], **given).invoke(ASKED, THREAD)


def turn(session: str) -> list[tuple[str, str]]:
    """The model asks for the tool, and the tool runs."""
    return [(what, session) for what in ("generate", "pin", "refresh")]


def test_hints_are_for_the_session_and_namespace_of_the_request(hinting: Any) -> None:
    backend = hinting([CALL, "It rains."])
    named = {"session": "mine", "namespace": "tenant-a"}
    play(ChatCacheSlide(backend=backend, session="own", namespace="b"), named, named)
    ends = [(what, "mine") for what in ("generate", "release", "release")]
    assert backend.events == [*turn("mine"), *ends]
    assert {request.namespace for request in backend.requests} == {"tenant-a"}
    assert backend.hinted == {"tenant-a"}


def test_what_was_pinned_is_released_though_the_next_request_names_another(hinting: Any) -> None:
    backend = hinting([CALL, "It rains."])
    play(ChatCacheSlide(backend=backend), {"session": "a"}, {"session": "b"})
    assert backend.events == [*turn("a"), ("generate", "b"), ("release", "a"), ("release", "b")]


def test_what_was_pinned_is_released_though_the_next_request_fails(
    hinting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = hinting([CALL, "It rains."])
    answer = backend._pieces

    def once(request: Any) -> Any:
        if len(backend.requests) > 1:
            raise BackendError("the engine has ended")
        return answer(request)

    monkeypatch.setattr(backend, "_pieces", once)
    with pytest.raises(BackendError, match="has ended"):
        play(ChatCacheSlide(backend=backend), {"session": "a"}, {"session": "b"})
    assert sorted(backend.events[3:]) == [("release", "a"), ("release", "b")]


def test_request_of_no_session_gives_no_hints(hinting: Any) -> None:
    backend = hinting([CALL, "It rains."])
    play(ChatCacheSlide(backend=backend, session="own"), *[{"session": None}] * 2)
    assert backend.events == [("generate", None)] * 2


def test_a_binding_names_session_and_namespace_of_calls_and_hints(hinting: Any) -> None:
    backend = hinting([CALL, "It rains."])
    play(ChatCacheSlide(backend=backend).bind(session="mine", namespace="b"))
    assert {request.session for request in backend.requests} == {"mine"}
    assert {request.namespace for request in backend.requests} == backend.hinted == {"b"}
    assert {session for _, session in backend.events} == {"mine"}


def test_session_of_a_binding_stays_in_a_graph(hinting: Any) -> None:
    backend = hinting(["Yes"])
    model = ChatCacheSlide(backend=backend).bind(session="mine").bind(temperature=0.0)
    in_session(model, "t1").invoke("Go")
    SessionHints(model, "t1").tool_runs()
    assert backend.events == turn("mine")


def test_hints_go_to_the_model_that_a_binding_names(
    hinting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, Any] = {}

    def load(name: str, *, model: str) -> Any:
        loaded[model] = hinting(["Yes"], model_id=model)
        return loaded[model]

    monkeypatch.setattr("langchain_cacheslide.loader.load_backend", load)
    bound = ChatCacheSlide(model="small").bind(model="large")
    SessionHints(bound, "t1").tool_runs()
    assert list(loaded) == ["large"]
    assert loaded["large"].events == [("pin", "t1"), ("refresh", "t1")]
