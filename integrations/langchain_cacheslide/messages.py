"""Chunks travel through LangChain as annotated text blocks.

In: a `ChunkedPrompt`, or LangChain messages from anywhere. Out: the other of the two.

A chunk becomes a text block with `extras={"cacheslide": {"id", "role", "task"}}`, LangChain's place
for provider data. Annotations are hints: one that is damaged, unknown or repeated never changes the
text of the prompt, only how it is cut. Where they were lost, the side channel has the chunks of
every message whose text is as it was rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.prompt_values import ChatPromptValue

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.prompt.auto import chunk_messages
from cacheslide_agents.prompt.wire import ChunkPlans, plan_key, shared_task
from langchain_cacheslide.dialogue import to_dict

KEY = "cacheslide"


@dataclass(frozen=True, slots=True)
class Reading:
    """Messages as a prompt. `plan` says where its chunks come from.

    `given` (annotations), `recalled` (the side channel), `automatic` (neither), or `mismatch: ...`
    where a message was changed after it was rendered and so has no plan any more.
    """

    prompt: ChunkedPrompt
    plan: str


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
    return read_messages(messages, task).prompt


def read_messages(
    messages: Sequence[BaseMessage],
    task: str | None = None,
    plans: ChunkPlans | None = None,
    namespace: str = "default",
) -> Reading:
    """The same, with chunks from the side channel where annotations were lost.

    Annotated prompts are remembered in `plans`, within `namespace`, for turns to come.
    """
    dialogue = [to_dict(message) for message in messages]
    automatic = chunk_messages(dialogue)
    taken = {chunk.id for chunk in automatic.chunks()}
    known = plans or ChunkPlans()
    cutter = _Cutter(known, namespace, taken)
    rows = zip(automatic.messages, dialogue, messages, strict=True)
    cut = tuple(
        cutter.cut(index, message, given["content"], _announced(original))
        for index, (message, given, original) in enumerate(rows)
    )
    told = task or next(iter(cutter.tasks), None) or _recalled_task(automatic, known, namespace)
    prompt = ChunkedPrompt(cut, told or automatic.task)
    if cutter.annotated:
        known.remember(replace(prompt, messages=tuple(cutter.annotated)), namespace)
    return Reading(prompt, cutter.outcome)


class _Cutter:
    """Cuts message after message, and keeps count of where the chunks came from."""

    def __init__(self, plans: ChunkPlans, namespace: str, taken: set[str]) -> None:
        self.tasks: list[str] = []
        self.annotated: list[Message] = []
        self._plans = plans
        self._namespace = namespace
        self._taken = taken
        self._recalled = 0
        self._changed: list[int] = []

    @property
    def outcome(self) -> str:
        if self._changed:
            places = ", ".join(map(str, self._changed))
            return f"mismatch: message {places} changed after it was rendered"
        if self._recalled:
            return "recalled"
        return "given" if self.annotated else "automatic"

    def cut(self, index: int, message: Message, content: Any, announced: str | None) -> Message:
        notes = [{}] if isinstance(content, str) else [_note(block) for block in content]
        if any(notes):
            self.tasks += [note["task"] for note in notes if "task" in note]
            chunks = zip(message.chunks, notes, strict=True)
            named = replace(message, chunks=tuple(self._named(*pair) for pair in chunks))
            self.annotated.append(named)
            return named
        plan = self._plans.recall(message, self._namespace) if message.chunks else None
        if plan is not None and self._taken.isdisjoint(name for name, _, _ in plan.chunks):
            self._recalled += 1
            self._taken.update(name for name, _, _ in plan.chunks)
            return replace(message, chunks=plan.cut(message.content))
        if plan is None and announced not in (None, plan_key(message)):
            self._changed.append(index)
        return message

    def _named(self, chunk: Chunk, note: Mapping[str, str]) -> Chunk:
        """`chunk` under its author's id and role, unless another chunk already has that id."""
        name = note.get("id", chunk.id)
        if name in self._taken:
            name = chunk.id
        self._taken.add(name)
        role = note.get("role")
        return Chunk(name, chunk.text, Role(role) if role in tuple(Role) else chunk.role)


def _recalled_task(prompt: ChunkedPrompt, plans: ChunkPlans, namespace: str) -> str | None:
    """What the messages before the first answer are known to be, if they agree."""
    opening = takewhile(lambda message: message.role != "assistant", prompt.messages)
    return shared_task(plans.recall(message, namespace) for message in opening if message.chunks)


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
    converted.additional_kwargs[KEY] = plan_key(message)
    return converted


def _annotation(chunk: Chunk, task: str) -> dict[str, str]:
    return {"id": chunk.id, "role": chunk.role.value, "task": task}


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    """LangChain reads call arguments as JSON text only."""
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"])
    return {**call, "function": function}


def _note(block: Any) -> dict[str, str]:
    """What is sound in a block's annotation."""
    extras = block.get("extras") if isinstance(block, dict) else None
    note = extras.get(KEY) if isinstance(extras, dict) else None
    if not isinstance(note, dict):
        return {}
    return {key: value for key, value in note.items() if isinstance(value, str) and value}


def _announced(message: BaseMessage) -> str | None:
    """The key of the plan that the message had when it was rendered."""
    key = message.additional_kwargs.get(KEY)
    return key if isinstance(key, str) else None
