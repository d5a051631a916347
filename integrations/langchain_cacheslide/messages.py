"""Chunks travel through LangChain as annotated text blocks.

In: a `ChunkedPrompt`, or LangChain messages from anywhere. Out: the other of the two.

A chunk becomes a text block with `extras={"cacheslide": {"id", "role", "task"}}`, LangChain's place
for provider data. Annotations are hints: one that is damaged, unknown or repeated never changes the
text of the prompt, only how it is cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import ChatPromptValue

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.prompt.auto import chunk_messages

KEY = "cacheslide"
_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_SAID_ELSEWHERE = frozenset({"tool_call", "tool_use", "function_call", "reasoning", "thinking"})
"""Blocks that repeat `tool_calls`, or hold thoughts, which are not sent again."""


def to_messages(prompt: ChunkedPrompt) -> list[BaseMessage]:
    """Messages that remember the chunks of `prompt`, for any place that takes messages."""
    return [_to_message(message, prompt.task) for message in prompt.messages]


def to_prompt_value(prompt: ChunkedPrompt) -> ChatPromptValue:
    """The same as LangChain's prompt templates return."""
    return ChatPromptValue(messages=to_messages(prompt))


def from_messages(messages: Sequence[BaseMessage], task: str | None = None) -> ChunkedPrompt:
    """The chunks of `messages`: annotated blocks as annotated, the rest cut automatically.

    `task=None` takes the one of the first annotation. Raises `PromptError` for content that is not
    text and for roles no chat template knows.
    """
    dialogue = [_to_dict(message) for message in messages]
    automatic = chunk_messages(dialogue)
    taken = {chunk.id for chunk in automatic.chunks()}
    cut: list[Message] = []
    tasks: list[str] = []
    for message, given in zip(automatic.messages, dialogue, strict=True):
        content = given["content"]
        notes = [{}] if isinstance(content, str) else [_note(block) for block in content]
        tasks += [note["task"] for note in notes if "task" in note]
        chunks = zip(message.chunks, notes, strict=True)
        cut.append(replace(message, chunks=tuple(_named(*pair, taken) for pair in chunks)))
    return ChunkedPrompt(tuple(cut), task or next(iter(tasks), automatic.task))


def _to_message(message: Message, task: str) -> BaseMessage:
    blocks = [
        {"type": "text", "text": chunk.text, "extras": {KEY: _annotation(chunk, task)}}
        for chunk in message.chunks
    ]
    given: dict[str, Any] = {"role": message.role, "content": blocks, **message.extra}
    if message.role == "tool":
        given.setdefault("tool_call_id", "")
    if "tool_calls" in given:
        given["tool_calls"] = [_with_json(call) for call in given["tool_calls"]]
    (converted,) = convert_to_messages([given])
    return converted


def _annotation(chunk: Chunk, task: str) -> dict[str, str]:
    return {"id": chunk.id, "role": chunk.role.value, "task": task}


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    """LangChain reads call arguments as JSON text only."""
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"])
    return {**call, "function": function}


def _to_dict(message: BaseMessage) -> dict[str, Any]:
    """An OpenAI-style message whose blocks keep their annotations."""
    given: dict[str, Any] = {"role": _role(message), "content": _content(message)}
    given["name"] = message.name
    given["reasoning_content"] = message.additional_kwargs.get("reasoning_content")
    if isinstance(message, ToolMessage):
        given["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        calls = [*message.tool_calls, *message.invalid_tool_calls]
        given["tool_calls"] = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in calls
        ]
    return given


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    kinds = (role for kind, role in _ROLES.items() if isinstance(message, kind))
    return next(kinds, message.type)


def _content(message: BaseMessage) -> str | list[Any]:
    if isinstance(message.content, str):
        return message.content
    return [block for block in message.content if not _is_said_elsewhere(block)]


def _is_said_elsewhere(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in _SAID_ELSEWHERE


def _note(block: Any) -> dict[str, str]:
    """What is sound in a block's annotation."""
    extras = block.get("extras") if isinstance(block, dict) else None
    note = extras.get(KEY) if isinstance(extras, dict) else None
    if not isinstance(note, dict):
        return {}
    return {key: value for key, value in note.items() if isinstance(value, str) and value}


def _named(chunk: Chunk, note: Mapping[str, str], taken: set[str]) -> Chunk:
    """`chunk` under its author's id and role, unless another chunk already has that id."""
    name = note.get("id", chunk.id)
    if name in taken:
        name = chunk.id
    taken.add(name)
    role = note.get("role")
    return Chunk(name, chunk.text, Role(role) if role in tuple(Role) else chunk.role)
