"""Plain messages become chunks whose ids come from their content."""

from __future__ import annotations

from typing import Any

import pytest

from cacheslide_agents.chunks import Role, text_digest
from cacheslide_agents.errors import PromptError
from cacheslide_agents.prompt.auto import chunk_messages


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [chunk.id for chunk in chunk_messages(messages).chunks()]


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def test_each_message_and_each_text_block_is_a_chunk() -> None:
    blocks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}, "three"]
    prompt = chunk_messages([{"role": "system", "content": "rules"}, user(blocks)], task="qa")
    assert prompt.task == "qa"
    assert [(m.role, [c.text for c in m.chunks]) for m in prompt.messages] == [
        ("system", ["rules"]),
        ("user", ["one ", "two", "three"]),
    ]


def test_ids_come_from_role_and_content() -> None:
    assert ids([user("Hi")]) == [f"user-{text_digest('Hi')[:12]}"]
    assert ids([{"role": "assistant", "content": "Hi"}]) == [f"assistant-{text_digest('Hi')[:12]}"]


def test_an_elided_message_changes_no_other_id() -> None:
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c"), user("d")]
    assert ids(messages[:1] + messages[2:]) == ids(messages)[:1] + ids(messages)[2:]


def test_repeated_content_is_counted() -> None:
    first, second, third = ids([user("again"), user("again"), user("again")])
    assert (second, third) == (f"{first}-2", f"{first}-3")


def test_cache_control_is_a_hint_and_no_annotation_changes_the_text() -> None:
    bare = [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]
    annotated = [
        user(
            [
                {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "two", "citations": [1], "cache_control": None},
            ],
            id="msg_1",
            response_metadata={"x": 1},
            refusal=None,
        )
    ]
    plain, hinted = chunk_messages(bare), chunk_messages(annotated)
    assert [c.role for c in hinted.chunks()] == [Role.REUSE, Role.RECOMPUTE]
    assert [c.role for c in plain.chunks()] == [Role.RECOMPUTE, Role.RECOMPUTE]
    assert [(c.id, c.text) for c in hinted.chunks()] == [(c.id, c.text) for c in plain.chunks()]
    assert hinted.messages[0].extra == plain.messages[0].extra == {}


def test_calls_have_their_arguments_parsed_and_results_keep_their_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    prompt = chunk_messages(
        [
            user("Hi"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "ok", "tool_call_id": "c1", "name": "f", "status": "x"},
        ]
    )
    assert prompt.messages[1].chunks == ()
    assert prompt.messages[1].extra == {
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
        ]
    }
    assert prompt.messages[2].extra == {"tool_call_id": "c1", "name": "f"}


def test_arguments_that_are_not_json_stay_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "{broken"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (shown,) = chunk_messages([message]).messages[0].extra["tool_calls"]
    assert shown["function"]["arguments"] == "{broken"


def test_newer_and_older_role_names_are_understood() -> None:
    prompt = chunk_messages(
        [{"role": "developer", "content": "rules"}, {"role": "function", "content": "4"}]
    )
    assert [message.role for message in prompt.messages] == ["system", "tool"]


def older(arguments: str) -> dict[str, Any]:
    call = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "function_call": call}


def test_the_one_call_of_the_older_form_is_a_tool_call() -> None:
    (message,) = chunk_messages([older('{"a": 1}')]).messages
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert (message.chunks, message.extra) == ((), {"tool_calls": [call]})


def test_a_call_in_both_forms_is_one_call_and_a_null_one_is_none() -> None:
    newer = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    (both,) = chunk_messages([{**older("{}"), "tool_calls": [newer]}]).messages
    assert [call["id"] for call in both.extra["tool_calls"]] == ["c1"]
    (none,) = chunk_messages([user("Hi", function_call=None)]).messages
    assert none.extra == {}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "narrator", "content": "x"}, "message 0: unknown role 'narrator'"),
        ({"content": "x"}, "message 0: unknown role None"),
        (user(5), "message 0: content must be text or a list of blocks, not int"),
        (user([{"type": "image_url", "image_url": {}}]), "message 0, block 0: .*'image_url'"),
        (user(["a", 7]), "message 0, block 1: .*'int'"),
        (user([{"type": "text"}]), "message 0, block 0: only text blocks"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "args": {}}]},
            "message 0: a tool call must look like",
        ),
        ({"role": "assistant", "function_call": "f"}, "message 0: a tool call must look like"),
    ],
)
def test_what_cannot_be_sent_is_named(message: dict[str, Any], error: str) -> None:
    with pytest.raises(PromptError, match=error):
        chunk_messages([message])
