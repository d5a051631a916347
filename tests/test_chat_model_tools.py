"""ChatCacheSlide and tools: what is bound, what holds the model to it, and calls in its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from cacheslide_agents.errors import PromptError, RequestError
from langchain_cacheslide import ChatCacheSlide

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend


@tool
def search(query: str) -> str:
    """Look it up."""
    return query


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call(name: str, **arguments: Any) -> str:
    shown = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{shown}\n</tool_call>"


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend()
    return fake


@pytest.fixture
def chat(backend: FakeBackend) -> ChatCacheSlide:
    return ChatCacheSlide(backend=backend)


def whole(pieces: list[AIMessageChunk]) -> AIMessageChunk:
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    return joined


def grammar_of(backend: FakeBackend) -> Any:
    grammar = backend.requests[-1].grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.source)["format"]


def test_call_in_the_answer_becomes_a_tool_call_and_ends_it(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says = ["I look.\n" + call("search", query="sky")]
    answer = chat.bind_tools([search]).invoke("Why is it blue?")
    assert answer.content == "I look."
    (found,) = answer.tool_calls
    assert (found["name"], found["args"]) == ("search", {"query": "sky"})
    assert found["id"] is not None
    assert len(found["id"]) == 9
    assert answer.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_pieces_of_any_size_give_the_same_calls(
    chat: ChatCacheSlide, backend: FakeBackend, piece: int
) -> None:
    backend.piece = piece
    backend.says = [call("search", query='a "}" b\\') + "\n" + call("add", a=1, b=2)]
    answer = whole(list(chat.bind_tools([search, add]).stream("Go")))  # type: ignore[arg-type]
    assert [(c["name"], c["args"]) for c in answer.tool_calls] == [
        ("search", {"query": 'a "}" b\\'}),
        ("add", {"a": 1, "b": 2}),
    ]
    assert answer.content == ""
    assert len({c["id"] for c in answer.tool_calls}) == 2


def test_stream_gives_the_name_first_and_the_arguments_as_they_come(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says = [call("search", query="the sky")]
    pieces = [p for p in chat.bind_tools([search]).stream("Go") if p.tool_call_chunks]  # type: ignore[attr-defined]
    chunks = [chunk for piece in pieces for chunk in piece.tool_call_chunks]  # type: ignore[attr-defined]
    assert [chunk["name"] for chunk in chunks] == ["search"] + [None] * (len(chunks) - 1)
    assert [chunk["index"] for chunk in chunks] == [0] * len(chunks)
    assert len(chunks) > 4
    assert "".join(chunk["args"] or "" for chunk in chunks) == '{"query": "the sky"}'


def test_async_stream_and_async_answer_have_the_same_calls(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says = [call("add", a=1, b=2)]
    bound = chat.bind_tools([add])

    async def ask() -> list[Any]:
        pieces = [piece async for piece in bound.astream("Go")]
        return [whole(pieces).tool_calls, (await bound.ainvoke("Go")).tool_calls]  # type: ignore[arg-type]

    for calls in asyncio.run(ask()):
        assert [(c["name"], c["args"]) for c in calls] == [("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1',
        '<tool_call>\n{"name": "search", "arguments": {"query": "the s',
        '<tool_call>\n{"name": "search", "arguments": {"query": "the \\',
        '<tool_call>\n{"name": "search", "arguments": {"query": ["x"',
        '<tool_call>\n{"name": "sea',
        '<tool_call>\n{"nme": "search", "arguments": {}}\n</tool_call>',
        "<tool_call>\nsearch(sky)\n</tool_call>",
        "<tool_call>",
    ],
)
def test_call_that_is_cut_off_or_malformed_is_invalid_and_never_a_call(
    chat: ChatCacheSlide, backend: FakeBackend, text: str, stream: bool
) -> None:
    backend.says, backend.ends = [text], "length"
    bound = chat.bind_tools([search, add])
    answer: Any = whole(list(bound.stream("Go"))) if stream else bound.invoke("Go")  # type: ignore[arg-type]
    assert answer.tool_calls == []
    assert len(answer.invalid_tool_calls) == 1
    assert answer.response_metadata["finish_reason"] == "length"


def test_call_whose_parts_come_in_another_order_is_read_all_the_same(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says = ['<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>']
    (found,) = chat.bind_tools([add]).invoke("Go").tool_calls
    assert (found["name"], found["args"]) == ("add", {"a": 1, "b": 2})


def test_without_tools_a_call_is_just_text(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    backend.says = [call("add", a=1, b=2)]
    for model in (chat, chat.bind_tools([add], tool_choice="none")):
        answer = model.invoke("Go")
        assert answer.content == call("add", a=1, b=2)
        assert answer.tool_calls == []


def test_tools_are_a_chunk_of_the_prompt_and_counted(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says = ["Hi"]
    messages: list[BaseMessage] = [HumanMessage("Hi")]
    chat.bind_tools([search]).invoke(messages)
    (request,) = backend.requests
    assert request.spans[0].id == "tools"
    assert '"name": "search"' in backend.prompt(request)
    assert chat.get_num_tokens_from_messages(messages, tools=[search]) == len(request.prompt_ids)
    assert len(request.prompt_ids) > chat.get_num_tokens_from_messages(messages) + 100


class AddPydantic(BaseModel):
    """Add."""

    a: int = Field(gt=-1000, lt=1000)


class AddTyped(TypedDict):
    """Add."""

    a: int


def add_function(a: int) -> int:
    """Add."""
    return a


ANTHROPIC = {
    "name": "add_dict",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (AddPydantic, "AddPydantic"),
        (AddTyped, "AddTyped"),
        (add_function, "add_function"),
        (search, "search"),
        (ANTHROPIC, "add_dict"),
        ({"title": "Titled", "description": "x", "type": "object", "properties": {}}, "Titled"),
        ({"type": "function", "function": {"name": "bare"}}, "bare"),
    ],
)
def test_every_kind_of_tool_langchain_knows_can_be_bound_and_forced(
    chat: ChatCacheSlide, backend: FakeBackend, given: Any, name: str
) -> None:
    backend.says = [call(name)]
    answer = chat.bind_tools([given], tool_choice=name).invoke("Go")
    assert answer.tool_calls[0]["name"] == name
    (tag,) = grammar_of(backend)["tags"]
    assert tag["begin"] == f'<tool_call>\n{{"name": "{name}", "arguments": '
    assert tag["content"]["json_schema"]["type"] == "object"


@pytest.mark.parametrize(
    ("choice", "kind", "names"),
    [
        (None, "triggered_tags", ["search", "add"]),
        (False, "triggered_tags", ["search", "add"]),
        ("auto", "triggered_tags", ["search", "add"]),
        ("any", "tags_with_separator", ["search", "add"]),
        ("required", "tags_with_separator", ["search", "add"]),
        (True, "tags_with_separator", ["search", "add"]),
        ("add", "tags_with_separator", ["add"]),
        ({"type": "function", "function": {"name": "add"}}, "tags_with_separator", ["add"]),
        ("none", "any_text", []),
    ],
)
def test_choice_of_tool_becomes_a_grammar(
    chat: ChatCacheSlide, backend: FakeBackend, choice: Any, kind: str, names: list[str]
) -> None:
    chat.bind_tools([search, add], tool_choice=choice).invoke("Go")
    answer = grammar_of(backend)
    assert answer["type"] == kind
    begins = [tag["begin"] for tag in answer.get("tags", [])]
    assert [begin.split('"')[3] for begin in begins] == names
    assert answer.get("stop_after_first", False) is (kind == "tags_with_separator")


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["auto", "any"])
def test_parallel_calls_can_be_switched_on_and_off(
    chat: ChatCacheSlide, backend: FakeBackend, choice: str, parallel: bool
) -> None:
    bound = chat.bind_tools([search, add], tool_choice=choice, parallel_tool_calls=parallel)
    bound.invoke("Go")
    assert grammar_of(backend)["stop_after_first"] is not parallel


def test_marker_that_was_cut_off_behind_a_call_is_not_said(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says, backend.ends = [call("add", a=1, b=2) + "\n<tool"], "length"
    answer = chat.bind_tools([add]).invoke("Go")
    assert (answer.content, len(answer.tool_calls)) == ("", 1)


def test_turn_after_a_tool_result_can_end_in_text(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says = [call("add", a=1, b=2), "It is 3."]
    bound = chat.bind_tools([add])
    question = HumanMessage("1 + 2?")
    first = bound.invoke([question])
    second = bound.invoke([question, first, add.invoke(first.tool_calls[0])])
    assert second.content == "It is 3."
    assert second.tool_calls == []
    assert second.response_metadata["finish_reason"] == "stop"
    prompt = backend.prompt(backend.requests[1])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in prompt
    assert "<tool_response>\n3\n</tool_response>" in prompt


def test_failed_tool_says_so_once(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    history = [
        HumanMessage("1 + 2?"),
        AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "c1"}]),
    ]
    texts: list[Any] = [
        "b is missing",
        "Error: b is missing",
        [{"type": "text", "text": "b is missing"}],
    ]
    for content in texts:
        failed = ToolMessage(content, tool_call_id="c1", status="error")
        chat.bind_tools([add]).invoke([*history, failed])
        prompt = backend.prompt(backend.requests[-1])
        assert "<tool_response>\nError: b is missing\n</tool_response>" in prompt


def test_invalid_calls_stay_in_the_history_as_they_were(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    backend.says, backend.ends = ["<tool_call>\nadd(1, 2)\n</tool_call>"], "length"
    bound = chat.bind_tools([add])
    first = bound.invoke("Go")
    bound.invoke([HumanMessage("Go"), first, HumanMessage("Again")])
    assert "add(1, 2)" in backend.prompt(backend.requests[-1])


class Tree(BaseModel):
    """A tree."""

    children: list[Tree] = []


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ([{"name": 3}], {}, "must have a name"),
        ([object()], {}, "cannot be described"),
        ([{"type": "function", "function": {}}], {}, "must have a name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            {},
            "of type 'object'",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"x": {1, 2}}}}],
            {},
            "cannot be described",
        ),
        ([search], {"tool_choice": "find"}, "'find' names no bound tool; known: .*search"),
        ([search], {"tool_choice": {"type": "tool", "name": "x"}}, "'x' names no bound tool"),
        ([], {"tool_choice": "any"}, "no tool is bound"),
    ],
)
def test_tools_that_cannot_be_are_refused_when_they_are_bound(
    chat: ChatCacheSlide, tools: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        chat.bind_tools(tools, **options)


def test_two_tools_of_one_name_are_refused_before_the_backend_is_asked(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    with pytest.raises(RequestError, match="two tools are named search"):
        chat.bind_tools([search, search]).invoke("Go")
    assert backend.requests == []


def test_recursive_schema_is_sent_with_its_references(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    chat.bind_tools([Tree], tool_choice="any").invoke("Go")
    schema = grammar_of(backend)["tags"][0]["content"]["json_schema"]
    assert "children" in json.dumps(schema)


def test_lone_surrogate_in_a_result_is_one_clear_error(chat: ChatCacheSlide) -> None:
    messages = [
        HumanMessage("Go"),
        AIMessage("", tool_calls=[{"name": "add", "args": {}, "id": "c1"}]),
        ToolMessage("\ud83d", tool_call_id="c1"),
    ]
    with pytest.raises(PromptError, match="lone surrogate"):
        chat.bind_tools([add]).invoke(messages)
