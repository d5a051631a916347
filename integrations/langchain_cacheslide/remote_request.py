"""One call as the body of an OpenAI chat completion.

In: a question. Out: the keyword arguments of the `openai` client's `chat.completions.create`. A
plain server never sees a field that OpenAI's API does not have, except for the sampling settings it
was explicitly asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    convert_to_openai_messages,
)
from langchain_core.utils.function_calling import convert_to_openai_tool

from cacheslide_agents.errors import PromptError
from langchain_cacheslide.dialogue import content_of
from langchain_cacheslide.question import Question

KNOBS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings beyond OpenAI's API under vLLM's names, with the value that switches each off."""

_STANDARD = ("temperature", "max_tokens", "top_p", "seed")


def body_of(question: Question) -> dict[str, Any]:
    """The body but for `model`, `stream` and the chunk plan; `None` leaves a setting to the server.

    Raises `PromptError` for no messages and for text that is not Unicode.
    """
    if not question.messages:
        raise PromptError("the prompt has no messages; give at least one")
    settings = question.settings
    body: dict[str, Any] = {"messages": [as_openai(message) for message in question.messages]}
    for place, message in enumerate(body["messages"]):
        _expect_unicode(place, message["content"])
    body |= {name: settings[name] for name in _STANDARD if settings.get(name) is not None}
    if (stop := settings.get("stop")) is not None and len(stop):
        body["stop"] = [stop] if isinstance(stop, str) else list(stop)
    if (settings.get("n") or 1) > 1:
        body["n"] = settings["n"]
    body |= _logprobs(settings)
    if question.tools:
        body["tools"] = [_tool(tool, settings.get("strict")) for tool in question.tools]
        if settings.get("parallel_tool_calls") is False:
            body["parallel_tool_calls"] = False
        if question.tool_choice is not None:
            body["tool_choice"] = question.tool_choice
    if question.response_format is not None:
        body["response_format"] = _format(question.response_format)
    return body


def knobs_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings beyond OpenAI's API that are switched on."""
    given = {name: settings.get(name) for name in KNOBS}
    return {
        name: value for name, value in given.items() if value is not None and value != KNOBS[name]
    }


def as_openai(message: BaseMessage) -> dict[str, Any]:
    """`message` in OpenAI's form, its text in one piece.

    Servers join text blocks each in its own way; text that is joined here is the text whose chunks
    were counted. Blocks that are not text (images) are left to LangChain's own conversion.
    """
    content = content_of(message)
    if not isinstance(content, str):
        texts = [block if isinstance(block, str) else block.get("text") for block in content]
        said = [text for text in texts if isinstance(text, str)]
        content = "".join(said) if len(said) == len(content) else content
    # Not a copy of `message`: LangChain's converter reads tool calls from its content, too.
    (converted,) = convert_to_openai_messages([message.model_copy(update={"content": content})])
    result: dict[str, Any] = dict(converted)
    if isinstance(message, FunctionMessage):
        result |= {"role": "tool", "tool_call_id": _older_id(message.name)}
    if isinstance(message, AIMessage):
        calls = [*result.get("tool_calls", []), *_unreadable(message)] or _older_call(message)
        result |= {"tool_calls": calls} if calls else {}
    return result


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    """JSON mode knows no schema in OpenAI's API, and vLLM would drop it."""
    if given.get("type") != "json_object" or given.get("schema") is None:
        return dict(given)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}


def _tool(tool: Mapping[str, Any], strict: bool | None) -> dict[str, Any]:
    """`strict`: whether its calls shall match its schema, where it does not say so itself."""
    function = tool.get("function", {})
    if strict is None or not function or "strict" in function:
        return dict(tool)
    return convert_to_openai_tool(function, strict=strict)


def _expect_unicode(place: int, content: Any) -> None:
    """Half a surrogate pair cannot be sent in any encoding; images are left to the server."""
    try:
        (content if isinstance(content, str) else "").encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"message {place} holds half a surrogate pair at character {error.start}, which is "
            "not Unicode; clean the text"
        ) from None


def _unreadable(message: AIMessage) -> list[dict[str, Any]]:
    """Calls whose arguments are no JSON go back as they came: a tool message answers each."""
    return [
        {
            "type": "function",
            "id": call["id"],
            "function": {"name": call["name"] or "", "arguments": call["args"] or ""},
        }
        for call in message.invalid_tool_calls
    ]


def _older_call(message: AIMessage) -> list[dict[str, Any]]:
    """A call in OpenAI's older form, which servers drop from a prompt, in the newer one."""
    call = message.additional_kwargs.get("function_call")
    if not isinstance(call, Mapping):
        return []
    return [{"type": "function", "id": _older_id(call.get("name")), "function": dict(call)}]


def _older_id(name: str | None) -> str:
    """The older form has no ids: the function's name joins a call and its result."""
    return f"call_{name}"


def _logprobs(settings: Mapping[str, Any]) -> dict[str, Any]:
    if not settings.get("logprobs"):
        return {}
    top = settings.get("top_logprobs")
    return {"logprobs": True} if top is None else {"logprobs": True, "top_logprobs": top}
