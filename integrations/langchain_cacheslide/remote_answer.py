"""A server's answer in LangChain's words.

In: chat completions and the events of a stream, as plain mappings. Out: `ChatGenerationChunk`s, of
which the last carries usage, finish reason and receipt, or a whole `ChatResult`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCall, ToolCallChunk
from langchain_core.messages.tool import tool_call_chunk as make_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_cacheslide.results import PROVIDER
from langchain_cacheslide.toolcalls import JsonScanner
from langchain_cacheslide.usage import usage

Receipt = Mapping[str, Any]


@dataclass
class StreamedAnswer:
    """Turns the events of one stream into LangChain's chunks, and remembers what came.

    `facts`: the answer's id, model, usage and `kv_transfer_params`, as far as they were sent.
    """

    text: str = ""
    pieces: int = 0
    finish_reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    _arguments: dict[Any, str] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> ChatGenerationChunk | None:
        """`None` for an event that says nothing new: the role, the end, the usage."""
        named = ("id", "model", "usage", "kv_transfer_params")
        self.facts |= {name: event[name] for name in named if event.get(name)}
        choices = event.get("choices") or ()
        if not choices:
            return None
        choice = choices[0]
        delta: Mapping[str, Any] = choice.get("delta") or {}
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        content, extra = delta.get("content") or "", _extra(delta)
        calls = [_call_chunk(*numbered) for numbered in enumerate(delta.get("tool_calls") or ())]
        if not (content or calls or extra or choice.get("logprobs")):
            return None
        self.pieces += 1
        self.text += content if isinstance(content, str) else ""
        for call in calls:
            self._arguments[call["index"]] = self._arguments.get(call["index"], "") + (
                call["args"] or ""
            )
        message = AIMessageChunk(
            content=content,
            additional_kwargs=extra,
            tool_call_chunks=calls,
            response_metadata=_logprobs(choice),
            id=self.facts.get("id"),
        )
        return ChatGenerationChunk(message=message)

    def end(self, receipt: Receipt, usage: UsageMetadata | None) -> ChatGenerationChunk:
        """The last chunk: no text, all metadata."""
        metadata = _metadata(self.finish_reason, self.facts, receipt)
        last = next(reversed(self._arguments), None)
        message = AIMessageChunk(
            content="",
            tool_call_chunks=[
                make_chunk(name=None, args=spoiler, id=None, index=index)
                for index, arguments in self._arguments.items()
                if (spoiler := _spoiler(arguments, self.finish_reason, last=index == last))
            ],
            response_metadata=metadata,
            usage_metadata=usage,
            id=self.facts.get("id"),
            chunk_position="last",
        )
        generation_info = {"finish_reason": self.finish_reason}
        return ChatGenerationChunk(message=message, generation_info=generation_info)


def expect_answers(answer: Mapping[str, Any]) -> None:
    """`ValueError` for an answer that holds none, with what the server says about it."""
    choices = answer.get("choices") or ()
    error = answer.get("error")
    if error and not choices:
        said = error.get("message") if isinstance(error, Mapping) else None
        raise ValueError(f"it reports an error: {said or error}")
    if not choices:
        raise ValueError("the answer holds no choices")
    for place, choice in enumerate(choices):
        if not isinstance(choice.get("message"), Mapping):
            raise ValueError(f"choice {place} of the answer holds no message")


def result_of(
    answer: Mapping[str, Any], receipt: Receipt, usage: UsageMetadata | None
) -> ChatResult:
    """All n answers of one request; usage, which the server counts once, stands in the first."""
    generations = []
    for place, choice in enumerate(answer.get("choices") or ()):
        reason = choice.get("finish_reason")
        message = _message(choice["message"], reason)
        message.response_metadata = _logprobs(choice) | _metadata(reason, answer, receipt)
        message.usage_metadata = None if place else usage
        message.id = answer.get("id") if not place else None
        info = {"finish_reason": reason}
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(generations=generations, llm_output={"model_name": answer.get("model")})


def usage_of(given: Mapping[str, Any] | None, receipt: Receipt | None) -> UsageMetadata | None:
    """Token counts, `None` if the server sent none.

    `receipt`, when it is the server's own, says what was reused and so what was newly stored;
    without one, `cache_read` is what the server's prefix cache served, if it says so.
    """
    if not given:
        return None
    prompt, output = int(given.get("prompt_tokens") or 0), int(given.get("completion_tokens") or 0)
    thought = (given.get("completion_tokens_details") or {}).get("reasoning_tokens")
    if receipt is None:
        return usage(prompt, output, reused=cached_tokens(given), thought=thought)
    reused = int(receipt["reused_tokens"])
    return usage(prompt, output, reused=reused, stored=max(0, prompt - reused), thought=thought)


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """What the server's own prefix cache served; `None` if it does not say."""
    count = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return None if count is None else int(count)


def _spoiler(arguments: str, finish_reason: str | None, *, last: bool) -> str:
    """What has to follow arguments that are not whole, lest LangChain makes them so."""
    try:
        json.loads(arguments or _none_given(finish_reason, last=last), strict=False)
    except ValueError:
        scanner = JsonScanner()
        for letter in arguments:
            scanner.feed(letter)
        return scanner.spoiler()
    return ""


def _none_given(finish_reason: str | None, *, last: bool) -> str:
    """What no arguments mean: none are needed, unless the answer was cut off before them.

    That happens to its last call only.
    """
    return "" if last and finish_reason == "length" else "{}"


def _metadata(
    finish_reason: str | None, facts: Mapping[str, Any], receipt: Receipt
) -> dict[str, Any]:
    return {
        "finish_reason": finish_reason,
        "model_name": facts.get("model"),
        "model_provider": PROVIDER,
        "cacheslide": dict(receipt),
    }


def _message(given: Mapping[str, Any], finish_reason: str | None) -> AIMessage:
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    wanted = given.get("tool_calls") or ()
    for number, call in enumerate(wanted, 1):
        default = _none_given(finish_reason, last=number == len(wanted))
        try:
            if not (_function(call).get("arguments") or default):
                raise OutputParserException("the answer was cut off before the arguments")
            parsed: Any = parse_tool_call(call, return_id=True)
            if not isinstance(parsed["args"], dict):
                raise OutputParserException("arguments must be a JSON object")
            calls.append(parsed)
        except OutputParserException as error:
            invalid.append(make_invalid_tool_call(call, str(error)))
    return AIMessage(
        content=given.get("content") or "",
        additional_kwargs=_extra(given),
        tool_calls=calls,
        invalid_tool_calls=invalid,
    )


def _extra(given: Mapping[str, Any]) -> dict[str, Any]:
    """Thoughts, under either of the names servers use, and refusals."""
    thought = given.get("reasoning_content") or given.get("reasoning")
    extra = {"reasoning_content": thought, "refusal": given.get("refusal")}
    return {name: value for name, value in extra.items() if value}


def _logprobs(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}


def _call_chunk(place: int, call: Mapping[str, Any]) -> ToolCallChunk:
    """Some servers leave out the index: a call then is numbered by its place in the event."""
    function = _function(call)
    index = call.get("index")
    return make_chunk(
        name=function.get("name"),
        args=function.get("arguments"),
        id=call.get("id"),
        index=place if index is None else index,
    )


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call.get("function") or {}
