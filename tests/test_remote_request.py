"""LangChain's messages, tools and settings in OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from cacheslide_agents.errors import PromptError, RequestError
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
            {"role": "tool", "tool_call_id": "c1", "content": "broken"},
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
    ("choice", "sent"),
    [
        ("any", "required"),
        (True, "required"),
        (False, "none"),
        ("auto", "auto"),
        ("none", "none"),
        ("add", {"type": "function", "function": {"name": "add"}}),
        ({"type": "function", "function": {"name": "add"}},) * 2,
    ],
)
def test_tool_choice_is_said_in_openais_words(choice: Any, sent: Any) -> None:
    body = body_of(ASK, {}, tools=[add], tool_choice=choice)
    assert body["tool_choice"] == sent
    assert body["tools"][0]["function"]["name"] == "add"
    assert set(body["tools"][0]["function"]["parameters"]["properties"]) == {"x", "y"}


def test_tool_choice_that_names_no_tool_is_refused() -> None:
    with pytest.raises(RequestError, match=r"tool_choice='sub' names no tool.*any, add"):
        body_of(ASK, {}, tools=[add], tool_choice="sub")
    assert "tool_choice" not in body_of(ASK, {}, tool_choice="any")


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, {}),
        ({"logprobs": None}, {}),
        ({"logprobs": False}, {}),
        ({"logprobs": True}, {"logprobs": True}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": True, "top_logprobs": 4}),
        ({"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
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
    body = body_of(ASK, settings)
    assert body == {"messages": [{"role": "user", "content": "hi"}], **sent}


def test_prompt_that_cannot_be_sent_is_refused_before_any_request() -> None:
    with pytest.raises(PromptError, match="no messages"):
        body_of([], {})
    with pytest.raises(PromptError, match="message 1 holds half a surrogate pair at character 2"):
        body_of([*ASK, HumanMessage("a \ud83d")], {})
    sent = body_of([HumanMessage("a \U0001f642")], {})
    assert sent["messages"][0]["content"] == "a \U0001f642"


def test_response_format_is_passed_on() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert body_of(ASK, {}, response_format=schema)["response_format"] == schema


def test_knobs_at_their_off_values_are_not_sent() -> None:
    off = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert knobs_of(off) == knobs_of(dict.fromkeys(off)) == {}
    assert knobs_of({**off, "top_k": 3, "temperature": 1.0}) == {"top_k": 3}
