"""LangChain's messages, tools and settings in OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool

from cacheslide_agents.errors import PromptError
from langchain_cacheslide import from_messages
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote_request import as_openai, body_of, knobs_of

ASK = [HumanMessage("hi")]


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            SystemMessage([text("a ", extras={"cacheslide": {"id": "x"}}), text("b"), "c"]),
            {"role": "system", "content": "a bc"},
        ),
        (HumanMessage([]), {"role": "user", "content": ""}),
        (
            AIMessage(
                [{"type": "reasoning", "reasoning": "hm"}, text("done")],
                additional_kwargs={"reasoning_content": "hm"},
            ),
            {"role": "assistant", "content": "done"},
        ),
        (
            ToolMessage("broken", tool_call_id="c1", status="error"),
            {"role": "tool", "tool_call_id": "c1", "content": "Error: broken"},
        ),
    ],
)
def test_text_is_sent_in_one_piece_and_nothing_but_text(
    message: BaseMessage, expected: dict[str, Any]
) -> None:
    assert as_openai(message) == expected


def test_calls_are_sent_once_and_unreadable_ones_as_they_came() -> None:
    call = {"name": "add", "args": {"x": 1}, "id": "c1"}
    message = AIMessage(
        content=[text("well"), {"type": "tool_call", **call}],
        tool_calls=[call],
        invalid_tool_calls=[{"name": "add", "args": "{x", "id": "c2", "error": "no JSON"}],
    )
    sent = as_openai(message)
    assert sent["content"] == "well"
    assert [(c["id"], c["function"]["arguments"]) for c in sent["tool_calls"]] == [
        ("c1", '{"x": 1}'),
        ("c2", "{x"),
    ]
    assert message.content[1] == {"type": "tool_call", **call}


@pytest.mark.parametrize(
    "kind",
    [
        "tool_call",
        "tool_call_chunk",
        "invalid_tool_call",
        "tool_use",
        "function_call",
        "reasoning",
        "thinking",
        "redacted_thinking",
    ],
)
def test_thoughts_and_what_repeats_calls_are_no_text_of_a_prompt(kind: str) -> None:
    block = {"type": kind, "name": "f", "args": "{", "id": "c1", "input": {}, "data": "hidden"}
    message = AIMessage([block, text("done")])
    assert as_openai(message)["content"] == from_messages([message]).messages[0].content == "done"


def test_call_of_the_older_form_is_sent_in_the_newer_one_with_its_result() -> None:
    call = {"name": "add", "arguments": '{"x": 1}'}
    asked = as_openai(AIMessage("", additional_kwargs={"function_call": call}))
    told = as_openai(FunctionMessage(content="1", name="add"))
    (sent,) = asked["tool_calls"]
    assert (sent["type"], sent["function"]) == ("function", call)
    assert (told["role"], told["content"], told["tool_call_id"]) == ("tool", "1", sent["id"])


def test_tools_in_openais_form_are_sent_as_they_are() -> None:
    given = convert_to_openai_tool(add)
    body = body_of(Question(ASK, {}, tools=[given], tool_choice="required"))
    assert (body["tools"], body["tool_choice"]) == ([given], "required")
    assert body_of(Question(ASK, {}, tool_choice="required")).keys() == {"messages"}


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, {}),
        ({"logprobs": None}, {}),
        ({"logprobs": False}, {}),
        ({"logprobs": True}, {"logprobs": True}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": True, "top_logprobs": 4}),
        ({"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": None}, {"logprobs": True}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": []}, {}),
        ({"n": 1}, {}),
        ({"temperature": 0.0, "top_p": 1.0}, {"temperature": 0.0, "top_p": 1.0}),
        ({"temperature": None, "seed": None, "max_tokens": None}, {}),
    ],
)
def test_settings_are_sent_unless_they_are_none(
    settings: dict[str, Any], sent: dict[str, Any]
) -> None:
    body = body_of(Question(ASK, settings))
    assert body == {"messages": [{"role": "user", "content": "hi"}], **sent}


def test_prompt_that_cannot_be_sent_is_refused_before_any_request() -> None:
    with pytest.raises(PromptError, match="no messages"):
        body_of(Question([], {}))
    with pytest.raises(PromptError, match="message 1 holds half a surrogate pair at character 2"):
        body_of(Question([*ASK, HumanMessage("a \ud83d")], {}))
    sent = body_of(Question([HumanMessage("a \U0001f642")], {}))
    assert sent["messages"][0]["content"] == "a \U0001f642"


def test_response_format_is_passed_on() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert body_of(Question(ASK, {}, response_format=schema))["response_format"] == schema


def test_knobs_at_their_off_values_are_not_sent() -> None:
    off = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert knobs_of(off) == knobs_of(dict.fromkeys(off)) == {}
    assert knobs_of({**off, "top_k": 3, "temperature": 1.0}) == {"top_k": 3}
