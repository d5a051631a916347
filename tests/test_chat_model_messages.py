"""Chunks that travel through LangChain messages and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.errors import PromptError
from langchain_cacheslide import from_messages, to_messages, to_prompt_value

CALL = {
    "type": "function",
    "id": "call-1",
    "function": {"name": "search", "arguments": {"query": "sky"}},
}
PROMPT = ChunkedPrompt(
    (
        Message("system", (Chunk("rules", "Be brief.", Role.REUSE),)),
        Message("user", (Chunk("notes", "Look. "), Chunk("text", "Sky?", Role.REUSE))),
        Message("assistant", (Chunk("call", "I search."),), {"tool_calls": [CALL]}),
        Message("tool", (Chunk("result", "Blue."),), {"tool_call_id": "call-1", "name": "search"}),
    ),
    task="sky",
)


def test_prompt_survives_the_way_through_langchain_messages() -> None:
    assert from_messages(to_messages(PROMPT)) == PROMPT


def test_prompt_survives_langchains_serialisation() -> None:
    sent = json.loads(json.dumps(messages_to_dict(to_messages(PROMPT))))
    assert from_messages(messages_from_dict(sent)) == PROMPT


def test_messages_have_langchains_own_types_and_text() -> None:
    messages = to_prompt_value(PROMPT).to_messages()
    kinds = [SystemMessage, HumanMessage, AIMessage, ToolMessage]
    assert [type(message) for message in messages] == kinds
    assert [message.text for message in messages] == [m.content for m in PROMPT.messages]
    assert messages[2].content_blocks[-1] == {
        "type": "tool_call",
        "id": "call-1",
        "name": "search",
        "args": {"query": "sky"},
    }


def test_call_of_openais_older_form_is_part_of_the_prompt() -> None:
    call = {"name": "search", "arguments": '{"query": "sky"}'}
    prompt = from_messages(
        [
            AIMessage("", additional_kwargs={"function_call": call}),
            FunctionMessage(content="Blue.", name="search"),
        ]
    )
    asked, told = prompt.messages
    assert asked.extra["tool_calls"] == [{k: CALL[k] for k in ("type", "function")}]
    assert (told.role, told.content, told.extra) == ("tool", "Blue.", {"name": "search"})


def test_message_added_to_a_rendered_prompt_is_cut_automatically_beside_it() -> None:
    prompt = from_messages([*to_messages(PROMPT)[:2], HumanMessage("And now?")])
    ids = [chunk.id for chunk in prompt.chunks()]
    assert ids[:3] == ["rules", "notes", "text"]
    assert ids[3].startswith("user-")
    assert prompt.task == "sky"


def test_same_rendered_prompt_twice_in_one_conversation_keeps_its_text() -> None:
    once = to_messages(PROMPT)[:2]
    prompt = from_messages([*once, AIMessage("Blue."), *once])
    assert [m.content for m in prompt.messages] == [
        "Be brief.",
        "Look. Sky?",
        "Blue.",
        "Be brief.",
        "Look. Sky?",
    ]
    assert [chunk.id for chunk in prompt.chunks()][:3] == ["rules", "notes", "text"]


NOTES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.text(),
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.one_of(st.sampled_from(["a", "b", ""]), st.integers(), st.none()),
            "role": st.one_of(st.sampled_from(["reuse", "recompute", "secret"]), st.none()),
            "task": st.one_of(st.sampled_from(["t", ""]), st.booleans()),
        },
    ),
)
BLOCKS = st.lists(st.tuples(st.text(max_size=5), NOTES), max_size=4)


@given(st.lists(BLOCKS, min_size=1, max_size=4))
def test_annotations_never_change_the_text(conversation: list[list[tuple[str, Any]]]) -> None:
    def message(blocks: list[tuple[str, Any]], *, annotated: bool) -> BaseMessage:
        extra = [{"extras": {"cacheslide": note}} if annotated else {} for _, note in blocks]
        return HumanMessage(
            content=[
                {"type": "text", "text": text, **more}
                for (text, _), more in zip(blocks, extra, strict=True)
            ]
        )

    with_notes = from_messages([message(blocks, annotated=True) for blocks in conversation])
    plain = from_messages([message(blocks, annotated=False) for blocks in conversation])
    assert [[c.text for c in m.chunks] for m in with_notes.messages] == [
        [c.text for c in m.chunks] for m in plain.messages
    ]


def test_unknown_role_in_an_annotation_leaves_the_hint_of_cache_control() -> None:
    block = {
        "type": "text",
        "text": "Long.",
        "cache_control": {"type": "ephemeral"},
        "extras": {"cacheslide": {"id": "doc", "role": "secret"}},
    }
    (chunk,) = from_messages([HumanMessage(content=[block])]).chunks()
    assert chunk == Chunk("doc", "Long.", Role.REUSE)


def test_streamed_answer_may_be_sent_again_as_history() -> None:
    prompt = from_messages([HumanMessage("Hi"), AIMessageChunk(content="Yes?")])
    assert [(m.role, m.content) for m in prompt.messages] == [("user", "Hi"), ("assistant", "Yes?")]


def test_tool_calls_that_are_also_content_blocks_are_sent_once() -> None:
    answer = AIMessage(
        content=[
            {"type": "reasoning", "reasoning": "Hm."},
            {"type": "text", "text": "I search."},
            {"type": "tool_use", "id": "call-1", "name": "search", "input": {"query": "sky"}},
        ],
        tool_calls=[{"name": "search", "args": {"query": "sky"}, "id": "call-1"}],
    )
    (message,) = from_messages([answer]).messages
    assert message.content == "I search."
    assert message.extra["tool_calls"] == [CALL]


def test_images_are_refused_by_place_and_kind() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(PromptError, match=r"message 0, block 1: only text.*'image_url'"):
        from_messages([HumanMessage(content=["Look:", image])])
