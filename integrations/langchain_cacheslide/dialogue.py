"""LangChain messages in OpenAI's words, which chat templates speak.

In: any LangChain message. Out: a mapping with role, content and what else a template may read.
Reasoning is left out: a model's thoughts are not sent to it again.
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from cacheslide_agents.errors import PromptError

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_SAID_ELSEWHERE = frozenset(
    {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"}
)
"""Blocks that repeat `tool_calls`."""
_THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
_NAMELESS = "invalid"
"""The function of a call that had no name; chat templates insist on one."""
_ERROR = "Error: "


def to_dict(message: BaseMessage) -> dict[str, Any]:
    """An OpenAI-style message whose blocks keep their annotations."""
    given: dict[str, Any] = {"role": _role(message), "content": content_of(message)}
    given["name"] = message.name
    if isinstance(message, ToolMessage):
        given["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        given["function_call"] = message.additional_kwargs.get("function_call")
        calls = [*message.tool_calls, *message.invalid_tool_calls]
        given["tool_calls"] = [
            {
                "id": call["id"],
                "function": {"name": call["name"] or _NAMELESS, "arguments": call["args"]},
            }
            for call in calls
        ]
    return given


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    kinds = (role for kind, role in _ROLES.items() if isinstance(message, kind))
    return next(kinds, message.type)


def content_of(message: BaseMessage) -> str | list[Any]:
    """What is said of `message`: no thoughts, no calls, and of a failed tool that it failed."""
    content = _checked(message)
    if not isinstance(content, str):
        content = [block for block in content if not _is_left_out(block)]
    is_failure = isinstance(message, ToolMessage) and message.status == "error"
    return _as_error(content) if is_failure else content


def _checked(message: BaseMessage) -> str | list[Any]:
    """LangChain checks it when a message is made, and not when it is changed."""
    content: Any = message.content
    if not isinstance(content, str | list):
        raise PromptError(
            f"the content of a message of type {message.type!r} must be text or a list of blocks, "
            f"not {content!r:.120}"
        )
    return content


def _is_left_out(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind in _SAID_ELSEWHERE or kind in _THOUGHTS


def _as_error(content: str | list[Any]) -> str | list[Any]:
    """A failed tool's result says so, for chat templates have no place for its status."""
    first = content if isinstance(content, str) else next(iter(content), "")
    text = first.get("text", "") if isinstance(first, dict) else first
    if str(text).lstrip().lower().startswith("error"):
        return content
    return _ERROR + content if isinstance(content, str) else [_ERROR, *content]
