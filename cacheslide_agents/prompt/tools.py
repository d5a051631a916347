"""Tools for chat templates that know none, and tool schemas as a chunk.

In: messages with tool calls and results, and tool schemas. Out: the same as plain text, for models
whose chat template would drop them without a word (SmolLM2's does).

The text we put in:

- after the system text, a chunk `tools`: an explanation and one JSON schema a line in `<tools>`;
- after the text of an assistant message, each call as JSON with `name` and `arguments` in
  `<tool_call>`;
- for each result, a user message with the result in `<tool_response>`; neighbours are joined, since
  many templates insist that user and assistant take turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

from cacheslide_agents.chunks import Chunk, Message, Role, text_digest
from cacheslide_agents.errors import PromptError
from cacheslide_agents.prompt.ids import UniqueIds

Tool = dict[str, Any]
TOOLS = "tools"

_BEFORE = (
    "You can call the following functions. Each line is the JSON schema of one of them.\n<tools>\n"
)
_AFTER = (
    "\n</tools>\nTo call a function, write its name and arguments as one JSON object, like this:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>\n'
    "The result follows in the next message, inside <tool_response> tags. When you need no "
    "function, answer in plain text."
)


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Tool schemas in the form `{"type": "function", "function": {"name", ...}}`."""
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(
                f"a tool must look like {{'type': 'function', 'function': {{'name': ...}}}}, "
                f"not {tool!r:.120}"
            )
    return [dict(tool) for tool in tools or ()]


def schema_lines(tools: Sequence[Tool]) -> str:
    return "\n".join(_json(tool) for tool in tools)


def marked_tools(tools: Sequence[Tool], sentinel: Callable[[int], str]) -> list[Tool]:
    """The tools with a sentinel at the end of each description, or name where there is none."""
    marked = []
    for index, tool in enumerate(tools):
        function = dict(tool["function"])
        key = "description" if function.get("description") else "name"
        function[key] = f"{function[key]}{sentinel(index)}"
        marked.append({**tool, "function": function})
    return marked


def written_out(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation with tools, calls and results as text."""
    ids = UniqueIds(chunk.id for message in messages for chunk in message.chunks)
    written: list[Message] = []
    for message in messages:
        if message.role == "tool":
            result = _result(message, ids)
            if written and written[-1].extra is _RESULT:
                result = replace(result, chunks=(*written.pop().chunks, *result.chunks))
            written.append(result)
        else:
            written.append(_with_calls_as_text(message, ids))
    return _with_schemas(written, tools, ids) if tools else written


_RESULT: Mapping[str, Any] = MappingProxyType({})
"""Marks a message made of tool results."""


def _with_schemas(messages: list[Message], tools: Sequence[Tool], ids: UniqueIds) -> list[Message]:
    text = f"{_BEFORE}{schema_lines(tools)}{_AFTER}"
    system, rest = Message("system", ()), messages
    if messages and messages[0].role == "system":
        system, *rest = messages
    gap = "\n\n" if system.content else ""
    schemas = Chunk(ids.new(TOOLS), gap + text, Role.REUSE)
    return [replace(system, chunks=(*system.chunks, schemas)), *rest]


def _with_calls_as_text(message: Message, ids: UniqueIds) -> Message:
    calls = message.extra.get("tool_calls")
    if not calls:
        return message
    gaps = chain(["\n" if message.content else ""], repeat("\n"))
    chunks = []
    for gap, call in zip(gaps, calls, strict=False):
        text = _call_text(call)
        chunks.append(Chunk(ids.new(f"call-{text_digest(text)[:12]}"), gap + text))
    extra = {key: value for key, value in message.extra.items() if key != "tool_calls"}
    return Message(message.role, (*message.chunks, *chunks), extra)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = parsed_arguments(function.get("arguments", {}))
    shown = _json({"name": function.get("name"), "arguments": arguments})
    return f"<tool_call>\n{shown}\n</tool_call>"


def _result(message: Message, ids: UniqueIds) -> Message:
    chunks = list(message.chunks) or [Chunk(ids.new("result"), "")]
    chunks[0] = replace(chunks[0], text=f"<tool_response>\n{chunks[0].text}")
    chunks[-1] = replace(chunks[-1], text=f"{chunks[-1].text}\n</tool_response>\n")
    return Message("user", tuple(chunks), _RESULT)


def parsed_arguments(arguments: Any) -> Any:
    """Call arguments as data; OpenAI sends them as a JSON string, templates expect an object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"tool schemas and calls must be JSON data: {error}") from error
