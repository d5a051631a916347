"""ChatCacheSlide where people put it: in agents and graphs, under limits, with secrets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel, SecretStr

from cacheslide_agents.errors import ContextOverflowError, PromptError, RequestTimeoutError
from langchain_cacheslide import ChatCacheSlide

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend(max_model_len=1 << 20)
    return fake


@pytest.fixture
def chat(backend: FakeBackend) -> ChatCacheSlide:
    return ChatCacheSlide(backend=backend)


class TestAgents:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("langchain", reason="the package langchain is not installed")

    def test_agent_calls_a_tool_and_ends_in_text(
        self, chat: ChatCacheSlide, backend: FakeBackend
    ) -> None:
        from langchain.agents import create_agent

        backend.says = [CALL, "It is 3."]
        agent: Any = create_agent(chat, [add], system_prompt="Be brief.")
        state = agent.invoke({"messages": [HumanMessage("1 + 2?")]})
        assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]
        assert state["messages"][-1].content == "It is 3."
        assert len(backend.requests) == 2

    @pytest.mark.parametrize("with_tools", [False, True])
    def test_agent_answers_in_a_schema_by_the_provider_strategy(
        self, chat: ChatCacheSlide, backend: FakeBackend, with_tools: bool
    ) -> None:
        from langchain.agents import create_agent

        class Sum(BaseModel):
            """A sum."""

            value: int

        backend.says = [CALL, '{"value": 3}'] if with_tools else ['{"value": 3}']
        agent: Any = create_agent(chat, [add] if with_tools else [], response_format=Sum)
        state = agent.invoke({"messages": [HumanMessage("1 + 2?")]})
        assert state["structured_response"] == Sum(value=3)
        grammar = backend.requests[-1].grammar
        assert grammar is not None
        assert grammar.kind == ("structural_tag" if with_tools else "json_schema")

    def test_agent_streams_its_messages_token_by_token(
        self, chat: ChatCacheSlide, backend: FakeBackend
    ) -> None:
        from langchain.agents import create_agent

        backend.says = ["It is three."]
        agent: Any = create_agent(chat, [add])
        question = {"messages": [HumanMessage("1 + 2?")]}
        pieces = [piece for piece, _ in agent.stream(question, stream_mode="messages")]
        assert len(pieces) > 3
        assert "".join(piece.text for piece in pieces) == "It is three."

    def test_call_that_was_cut_off_is_not_run_by_a_streaming_agent(
        self, chat: ChatCacheSlide, backend: FakeBackend
    ) -> None:
        from langchain.agents import create_agent

        backend.says, backend.ends = [CALL[:46]], "length"
        agent: Any = create_agent(chat, [add])
        question = {"messages": [HumanMessage("1 + 2?")]}
        states = [state for state in agent.stream(question, stream_mode=["messages", "values"])]
        final = [state for mode, state in states if mode == "values"][-1]
        assert [message.type for message in final["messages"]] == ["human", "ai"]

    def test_graph_with_a_checkpointer_keeps_the_conversation(
        self, chat: ChatCacheSlide, backend: FakeBackend
    ) -> None:
        from langgraph.checkpoint.memory import InMemorySaver
        from langgraph.graph import START, MessagesState, StateGraph

        def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [chat.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_edge(START, "ask")
        compiled: Any = graph.compile(checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        for text in ("first words", "second words"):
            state = compiled.invoke({"messages": [HumanMessage(text)]}, config)
        assert [message.text for message in state["messages"]] == [
            "first words",
            "first words",
            "second words",
            "second words",
        ]
        receipt = state["messages"][-1].response_metadata["cacheslide"]
        assert json.loads(json.dumps(receipt)) == receipt


def test_fallback_answers_when_the_model_fails(
    chat: ChatCacheSlide, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: Any) -> Any:
        raise ContextOverflowError(len(request.prompt_ids), 8)

    broken = ChatCacheSlide(backend=type(backend)())
    monkeypatch.setattr(broken.backend, "_pieces", fail)
    assert broken.with_fallbacks([chat]).invoke("Hi there").content == "Hi there"


def test_config_reaches_callbacks_and_settings(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    configurable = chat.configurable_fields(max_tokens=ConfigurableField(id="most"))
    configurable.with_config(configurable={"most": 7}, tags=["x"]).invoke("Hi")
    assert backend.requests[0].sampling.max_tokens == 7


def test_rate_limiter_is_asked_before_the_backend(backend: FakeBackend) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=1e-9, check_every_n_seconds=0.001)
    asked = []

    def acquire(*, blocking: bool = True) -> bool:
        asked.append(len(backend.requests))
        return True

    limiter.acquire = acquire  # type: ignore[method-assign]
    ChatCacheSlide(backend=backend, rate_limiter=limiter).invoke("Hi")
    assert asked == [0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answer_that_takes_too_long_is_given_up(
    chat: ChatCacheSlide, backend: FakeBackend, asynchronous: bool
) -> None:
    backend.pause_s = 0.2
    slow = chat.bind(timeout=0.05)
    with pytest.raises(RequestTimeoutError, match=r"not whole after 0.05 s") as caught:
        if asynchronous:
            asyncio.run(slow.ainvoke("one two three four"))
        else:
            slow.invoke("one two three four")
    assert isinstance(caught.value, TimeoutError)
    for thread in threading.enumerate():
        if thread.name.startswith("cacheslide-deadline"):
            thread.join()
    assert (backend.finished, backend.stopped) == (0, 1)


def test_answer_in_time_is_whole_and_errors_come_through(
    chat: ChatCacheSlide, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat.invoke("one two", timeout=60).content == "one two"

    def fail(request: Any) -> Any:
        raise ContextOverflowError(9, 8)

    monkeypatch.setattr(backend, "_pieces", fail)
    with pytest.raises(ContextOverflowError):
        chat.invoke("one two", timeout=60)


def test_secrets_are_in_no_dump_trace_or_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESLIDE_API_KEY", "hush-hush")
    chat = ChatCacheSlide(base_url="http://localhost:1/v1", model="m")
    assert chat.api_key == SecretStr("hush-hush")
    shown = [repr(chat), str(chat), dumps(chat), str(chat.model_dump()), chat.model_dump_json()]
    shown += [str(chat._get_ls_params()), str(chat._get_invocation_params()), str(chat.asdict())]
    assert not any("hush-hush" in text for text in shown)


def test_profile_tells_agents_what_the_model_can_do(chat: ChatCacheSlide) -> None:
    profile = chat.profile
    assert profile is not None
    assert profile["structured_output"] is True
    assert profile["tool_calling"] is True
    assert profile["max_input_tokens"] == 1 << 20


def test_server_estimates_its_tokens_and_takes_no_backend() -> None:
    chat = ChatCacheSlide(base_url="http://localhost:1/v1", model="m")
    assert chat.get_num_tokens("four words are here") > 2
    assert chat.get_num_tokens_from_messages([HumanMessage("Hi")], tools=[add]) > 20
    with pytest.raises(Exception, match="is not loaded in this process"):
        chat.load()
    with pytest.raises(Exception, match="exclude each other"):
        ChatCacheSlide(base_url="http://localhost:1/v1", backend="torch")


def test_conversation_without_messages_is_one_clear_error(chat: ChatCacheSlide) -> None:
    with pytest.raises(PromptError, match="has no messages"):
        chat.invoke([])


def test_only_a_system_message_is_sent(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    chat.invoke([SystemMessage("Be brief.")])
    assert "Be brief." in backend.prompt(backend.requests[0])


def test_two_hundred_turns_are_two_hundred_chunks(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    turns = [HumanMessage(f"q{i}") if i % 2 == 0 else AIMessage(f"a{i}") for i in range(201)]
    assert chat.invoke(turns).content == "q200"
    assert len(backend.requests[0].spans) == 202


def test_result_of_a_megabyte_is_counted_before_it_is_refused(
    chat: ChatCacheSlide, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(request: Any) -> Any:
        raise ContextOverflowError(len(request.prompt_ids), 8192)

    monkeypatch.setattr(backend, "_pieces", check)
    history = [
        HumanMessage("Go"),
        AIMessage("", tool_calls=[{"name": "add", "args": {}, "id": "c"}]),
        ToolMessage("word " * 200_000, tool_call_id="c"),
    ]
    with pytest.raises(ContextOverflowError, match=r"the prompt has 1000\d+ tokens"):
        chat.bind_tools([add]).invoke(history)


def test_characters_beyond_the_basic_plane_and_lone_halves_of_them(
    chat: ChatCacheSlide,
) -> None:
    assert chat.invoke("\U0001f642\U0001f680").content == "\U0001f642\U0001f680"
    with pytest.raises(PromptError, match="lone surrogate"):
        chat.invoke("half \ud83d")
