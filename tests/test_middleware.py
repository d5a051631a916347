"""The agent middleware in `create_agent`: which hints the backend gets, and in which order."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import ModuleType
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from cacheslide_agents.chunks import Role
from cacheslide_agents.errors import BackendError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.hints import SessionHints
from langchain_cacheslide.marks import chunk_block, marked_messages, marked_system
from langchain_cacheslide.middleware import CacheSlideMiddleware

RULES = "You look up the weather of towns."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bergen"}}\n</tool_call>'
ASKED: Any = {"messages": [HumanMessage("What is the weather in Bergen?")]}
THREAD: Any = {"configurable": {"thread_id": "t1"}}
TOOL_TURN = [("generate", "t1"), ("pin", "t1"), ("refresh", "t1"), ("generate", "t1")]


@tool
def weather(town: str) -> str:
    """The weather of a town."""
    if town == "Nowhere":
        raise ConnectionError
    return f"It rains in {town}."


@pytest.fixture
def scripted(support: Callable[[str], ModuleType]) -> Callable[..., ChatCacheSlide]:
    support("fake_backend")
    backend = support("hinting_backend").HintingBackend
    return lambda *answers: ChatCacheSlide(backend=backend(answers))


def agent(model: Any, middleware: Sequence[AgentMiddleware[Any, Any, Any]], **options: Any) -> Any:
    return create_agent(
        model,
        [weather],
        system_prompt=options.pop("system_prompt", RULES),
        middleware=middleware,
        checkpointer=InMemorySaver(),
        **options,
    )


def test_session_is_pinned_and_refreshed_while_the_tool_runs_and_released_at_the_end(
    scripted: Any,
) -> None:
    model = scripted(CALL, "It rains.")
    done = agent(model, [CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    assert [message.text for message in done["messages"]][1:] == [
        "",
        "It rains in Bergen.",
        "It rains.",
    ]
    assert model.backend.events == [*TOOL_TURN, ("release", "t1"), ("release", "t1")]


def test_async_agent_gives_the_same_hints(scripted: Any) -> None:
    model = scripted(CALL, "It rains.")
    asyncio.run(agent(model, [CacheSlideMiddleware()]).ainvoke(ASKED, THREAD))
    assert model.backend.events == [*TOOL_TURN, ("release", "t1"), ("release", "t1")]


def test_start_is_warmed_once_with_what_every_prompt_begins_with(scripted: Any) -> None:
    model = scripted("Hello.")
    middleware = CacheSlideMiddleware(model=model, system_prompt=RULES, tools=[weather])
    talks = agent(model, [middleware])
    for thread in ("a", "b"):
        talks.invoke(ASKED, {"configurable": {"thread_id": thread}})
    assert [what for what, _ in model.backend.events].count("warm") == 1
    assert model.backend.events[0][0] == "warm"
    (warmed,), prompts = model.backend.warmed, model.backend.prompts()
    head = warmed.removesuffix("<|im_start|>assistant\n")
    assert RULES in head
    assert '"weather"' in head
    assert all(prompt.startswith(head) for prompt in prompts)


def test_first_runs_that_start_at_once_warm_once(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scripted("Hello.")
    warm = model.backend.warm
    monkeypatch.setattr(
        model.backend, "warm", lambda request: (warm(request), Event().wait(0.05))[0]
    )
    middleware = CacheSlideMiddleware(model=model, system_prompt=RULES, tools=[weather])
    talks = agent(model, [middleware])
    with ThreadPoolExecutor(4) as pool:
        threads = [{"configurable": {"thread_id": name}} for name in "abcd"]
        list(pool.map(talks.invoke, [ASKED] * len(threads), threads))
    assert [what for what, _ in model.backend.events].count("warm") == 1


def test_server_can_be_warmed_before_the_first_run(scripted: Any) -> None:
    model = scripted("Hello.")
    middleware = CacheSlideMiddleware(model=model, system_prompt=RULES, tools=[weather])
    middleware.warm()
    agent(model, [middleware]).invoke(ASKED, THREAD)
    assert [what for what, _ in model.backend.events] == ["warm", "generate", "release"]


def test_prompt_is_the_same_as_without_the_middleware_but_its_chunks_are_named(
    scripted: Any,
) -> None:
    plain, marked = scripted(CALL, "It rains."), scripted(CALL, "It rains.")
    agent(plain, []).invoke(ASKED, THREAD)
    agent(marked, [CacheSlideMiddleware(task="weather")]).invoke(ASKED, THREAD)
    assert marked.backend.prompts() == plain.backend.prompts()
    spans = marked.backend.requests[-1].spans
    assert [span.id for span in spans][:2] == ["system", "tools"]
    assert spans[0].role is Role.REUSE
    assert [span.id.partition("-")[0] for span in spans][2] == "message"
    assert {request.task for request in marked.backend.requests} == {"weather"}


def test_message_ids_name_the_same_chunks_turn_after_turn(scripted: Any) -> None:
    model = scripted(CALL, "It rains.")
    agent(model, [CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    first, second = ([span.id for span in request.spans] for request in model.backend.requests)
    assert first[:3] == second[:3]


def test_memory_block_of_a_system_message_is_a_chunk_of_its_own(scripted: Any) -> None:
    memory = SystemMessage(
        [{"type": "text", "text": RULES}, chunk_block("\nYou are in Bergen.", "memory")]
    )
    model = scripted("Hello.")
    agent(model, [CacheSlideMiddleware()], system_prompt=memory).invoke(ASKED, THREAD)
    spans = {span.id: span.role for span in model.backend.requests[0].spans}
    assert (spans["system-1"], spans["memory"]) == (Role.REUSE, Role.RECOMPUTE)
    assert f"{RULES}\nYou are in Bergen." in model.backend.prompts()[0]


def test_run_without_a_thread_has_a_session_of_its_own(scripted: Any) -> None:
    model = scripted("Hello.")
    talks = create_agent(model, [weather], middleware=[CacheSlideMiddleware()])
    talks.invoke(ASKED)
    talks.invoke(ASKED)
    first, second = (request.session for request in model.backend.requests)
    assert first.startswith("run-")
    assert first != second


def test_session_that_the_model_names_itself_stays(scripted: Any) -> None:
    model = scripted("Hello.")
    named = ChatCacheSlide(backend=model.backend, session="mine")
    agent(named, [CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    assert model.backend.events == [("generate", "mine"), ("release", "mine")]


def test_hints_are_for_the_namespace_that_the_calls_name(scripted: Any) -> None:
    model = scripted(CALL, "It rains.")
    own = ChatCacheSlide(backend=model.backend, namespace="tenant-a")
    agent(own, [CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    assert ("pin", "t1") in model.backend.events
    assert {request.namespace for request in model.backend.requests} == {"tenant-a"}
    assert model.backend.hinted == {"tenant-a"}


@pytest.mark.parametrize(("bound", "namespace"), [({}, "mine"), ({"namespace": "b"}, "b")])
def test_a_binding_names_the_namespace_of_hints(
    scripted: Any, bound: dict[str, str], namespace: str
) -> None:
    backend = scripted("Yes").backend
    model = ChatCacheSlide(backend=backend, namespace="mine").bind(temperature=0.0).bind(**bound)
    SessionHints(model, "t1").tool_runs()
    assert backend.events == [("pin", "t1"), ("refresh", "t1")]
    assert backend.hinted == {namespace}


def test_model_that_fails_after_a_tool_leaves_nothing_pinned(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scripted(CALL, "It rains.")
    answer = model.backend._pieces

    def once(request: Any) -> Any:
        if len(model.backend.requests) > 1:
            raise BackendError("the engine has ended")
        return answer(request)

    monkeypatch.setattr(model.backend, "_pieces", once)
    with pytest.raises(BackendError, match="has ended"):
        agent(model, [CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    assert model.backend.events == [*TOOL_TURN[:3], ("release", "t1")]


def test_tool_that_raises_leaves_nothing_pinned(scripted: Any) -> None:
    model = scripted(CALL.replace("Bergen", "Nowhere"), "Hm.")
    with pytest.raises(ConnectionError):
        agent(model, [CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    assert [what for what, _ in model.backend.events] == ["generate", "pin", "refresh", "release"]


def test_run_that_a_tool_ended_is_forgotten(scripted: Any) -> None:
    middleware = CacheSlideMiddleware()
    model = scripted(CALL.replace("Bergen", "Nowhere"), "Hm.")
    backend = weakref.ref(model.backend)
    with pytest.raises(ConnectionError):
        create_agent(model, [weather], middleware=[middleware]).invoke(ASKED)
    del model
    gc.collect()
    assert backend() is None, "the middleware alone still knows the run"


def test_another_model_is_asked_exactly_as_without_the_middleware() -> None:
    class Writes(GenericFakeChatModel):
        seen: list[Any]

        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self.bind(**kwargs)

        def _generate(self, messages: Any, *rest: Any, **kwargs: Any) -> Any:
            self.seen.append(([(one.type, one.content) for one in messages], kwargs))
            return super()._generate(messages, *rest, **kwargs)

    call = {"name": "weather", "args": {"town": "Bergen"}, "id": "c1", "type": "tool_call"}
    asked = []
    for middleware in ([], [CacheSlideMiddleware()]):
        answers = iter([AIMessage("", tool_calls=[call]), AIMessage("It rains.")])
        model = Writes(messages=answers, seen=[])
        agent(model, middleware).invoke(ASKED, THREAD)
        asked.append(model.seen)
    assert asked[0] == asked[1]


def test_session_is_no_part_of_what_a_run_returns(scripted: Any) -> None:
    done = agent(scripted("Hello."), [CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    assert set(done) == {"messages"}


def test_marks_are_put_on_copies_and_leave_other_blocks_alone() -> None:
    image = {"type": "image", "url": "x"}
    cached = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    message = HumanMessage(["a", image, cached], id="7")
    (marked,) = marked_messages([message])
    assert message.content == ["a", image, cached]
    assert marked.content == [chunk_block("a", "message-7-1", Role.REUSE), image, cached]
    assert marked_messages([HumanMessage("a")]) == [HumanMessage("a")]
    assert marked_system(SystemMessage("")).content == ""


def test_middleware_works_beside_others(scripted: Any) -> None:
    class Counts(AgentMiddleware[AgentState[Any], Any, Any]):
        calls = 0

        def before_model(self, state: Any, runtime: Any) -> None:
            self.calls += 1

    counts, model = Counts(), scripted(CALL, "It rains.")
    agent(model, [counts, CacheSlideMiddleware()]).invoke(ASKED, THREAD)
    assert counts.calls == 2
