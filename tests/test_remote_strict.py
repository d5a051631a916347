"""What a server is told of calls and JSON: how many calls, and whether schemas are kept to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.exceptions import OutputParserException

from langchain_cacheslide import ChatCacheSlide

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
NAMED: dict[str, Any] = {"title": "look", **SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture
def server(support: Callable[[str], ModuleType]) -> Iterator[OpenAIServer]:
    with support("openai_server").OpenAIServer() as running:
        yield running


def add(x: int, y: int) -> int:
    """Adds."""
    return x + y


@pytest.mark.parametrize("strict", [None, True, False])
def test_strict_is_told_if_it_is_given(server: OpenAIServer, strict: bool | None) -> None:
    chat = ChatCacheSlide(base_url=server.url)
    chat.bind_tools([TOOL], strict=strict).invoke("Go")
    called = chat.with_structured_output(NAMED, method="function_calling", strict=strict)
    assert called.invoke("Go") is None  # the server answers in text
    with pytest.raises(OutputParserException):
        chat.with_structured_output(NAMED, tools=[TOOL], strict=strict).invoke("Go")
    bodies = server.bodies()
    assert len(bodies) == 3
    for body in bodies:
        (tool,) = body["tools"]
        assert tool["function"].get("strict") is strict
        closed = tool["function"]["parameters"].get("additionalProperties") is False
        assert closed is (strict is True)


@pytest.mark.parametrize(
    ("choice", "parallel", "sent"),
    [
        ("auto", None, None),
        ("auto", False, False),
        ("any", None, False),
        ("any", True, None),
        ("look", None, False),
        ("none", None, None),
        ("none", False, None),
    ],
)
def test_one_call_is_asked_for_where_it_is_wanted_or_forced(
    server: OpenAIServer, choice: str, parallel: bool | None, sent: bool | None
) -> None:
    chat = ChatCacheSlide(base_url=server.url)
    chat.bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=parallel).invoke("Go")
    (body,) = server.bodies()
    assert body.get("parallel_tool_calls") is sent


def test_tools_say_for_themselves_whether_they_are_strict(server: OpenAIServer) -> None:
    loose = {**TOOL, "function": {**TOOL["function"], "strict": False}}
    chat = ChatCacheSlide(base_url=server.url).bind_tools([loose, add], strict=True)
    chat.invoke("Go")
    (body,) = server.bodies()
    assert [tool["function"]["strict"] for tool in body["tools"]] == [False, True]


@pytest.mark.parametrize(
    ("schema", "sent"),
    [
        (NAMED, {"type": "json_schema", "json_schema": {"name": "answer", "schema": NAMED}}),
        (None, {"type": "json_object"}),
    ],
)
def test_json_mode_with_a_schema_says_so_in_openais_words(
    server: OpenAIServer, schema: dict[str, Any] | None, sent: dict[str, Any]
) -> None:
    chat = ChatCacheSlide(base_url=server.url)
    with pytest.raises(OutputParserException):
        chat.with_structured_output(schema, method="json_mode").invoke("Go")
    (body,) = server.bodies()
    assert body["response_format"] == sent
