"""Chunks for plain chat messages, without a template.

In: messages as OpenAI's chat API takes them. Out: a `ChunkedPrompt` with one chunk for each message
or text block. Ids come from the content, not from the position, so that an elided message changes
no other id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role, text_digest
from cacheslide_agents.errors import PromptError
from cacheslide_agents.prompt.collect import MESSAGE_ROLES
from cacheslide_agents.prompt.ids import UniqueIds
from cacheslide_agents.prompt.tools import parsed_arguments

_ALIASES = {"developer": "system", "function": "tool"}
_EXTRA = ("name", "tool_call_id", "tool_calls", "reasoning_content")
"""Fields chat templates read besides role and content; all others are annotations and dropped,
but for `function_call`, which becomes one of `tool_calls`."""


def chunk_messages(
    messages: Sequence[Mapping[str, Any]], *, task: str = "default"
) -> ChunkedPrompt:
    """One chunk per message or text block; a block with `cache_control` is hinted as reusable.

    Annotations never change the text. Raises `PromptError` for an unknown role, a block that is
    not text, or content of another type, naming the message.
    """
    ids = UniqueIds()
    return ChunkedPrompt(
        tuple(_message(index, message, ids) for index, message in enumerate(messages)), task
    )


def _message(index: int, message: Mapping[str, Any], ids: UniqueIds) -> Message:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise PromptError(
            f"message {index}: a message is a mapping with role and content, not {kind}"
        )
    given = message.get("role")
    role = _ALIASES.get(str(given), given)
    if role not in MESSAGE_ROLES:
        known = ", ".join((*MESSAGE_ROLES, *_ALIASES))
        raise PromptError(f"message {index}: unknown role {given!r}; use one of {known}")
    chunks = tuple(
        Chunk(ids.new(f"{role}-{text_digest(text)[:12]}"), text, hint)
        for text, hint in _texts(index, message.get("content"))
    )
    extra = {key: message[key] for key in _EXTRA if message.get(key)}
    if calls := _calls(index, message):
        extra["tool_calls"] = calls
    return Message(str(role), chunks, extra)


def _texts(index: int, content: Any) -> Iterator[tuple[str, Role]]:
    if content is None:
        return
    if isinstance(content, str):
        yield content, Role.RECOMPUTE
        return
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise PromptError(f"message {index}: content must be text or a list of blocks, not {kind}")
    for place, block in enumerate(content):
        yield _block(f"message {index}, block {place}", block)


def _block(place: str, block: Any) -> tuple[str, Role]:
    if isinstance(block, str):
        return block, Role.RECOMPUTE
    if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        raise PromptError(f"{place}: only text blocks can be sent to this model, not {kind!r}")
    return block["text"], Role.REUSE if block.get("cache_control") else Role.RECOMPUTE


def _calls(index: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """OpenAI's older form has one call, `function_call`, and no id for it."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    if not calls:
        calls = [{"function": older}] if older else []
    if not isinstance(calls, list | tuple):
        kind = type(calls).__name__
        raise PromptError(f"message {index}: tool_calls must be a list of calls, not {kind}")
    return [_call(index, call) for call in calls]


def _call(index: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(
            f"message {index}: a tool call must look like {{'id': ..., 'type': 'function', "
            f"'function': {{'name': ..., 'arguments': ...}}}}, not {call!r:.120}"
        )
    arguments = parsed_arguments(function.get("arguments", {}))
    shown = {"name": function["name"], "arguments": arguments}
    name = {"id": call["id"]} if call.get("id") else {}
    return {**name, "type": "function", "function": shown}
