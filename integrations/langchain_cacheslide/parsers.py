"""What makes data of an answer, and takes no half answer for a whole one.

In: a message, or the pieces of one. Out: an instance of the schema; of a stream, also what there is
of it so far. LangChain's own parsers mend JSON that breaks off, as a stream needs it: a number that
`max_tokens` cut in two would be a number still. Here the JSON that ends an answer must be whole;
only an answer that ended by itself may say something around it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    JsonOutputToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation

_CUT = {"length": "max_tokens cut it off; raise max_tokens", "cancelled": "it was cancelled"}
"""Finish reasons of answers that are not whole."""
_DECODER = json.JSONDecoder(strict=False)
_FENCE = re.compile(r"```(?:json)?")
_AROUND = " \n\r\t`"


class JsonParser(JsonOutputParser):
    """Any JSON value."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial or _is_over(result[0]):
            partial, result = False, [_whole(result[0])]
        return super().parse_result(result, partial=partial)


class InstanceParser(JsonParser, PydanticOutputParser[Any]):
    """An instance of a pydantic class."""


class _CallParser(JsonOutputToolsParser):
    """`None` for an answer that calls nothing."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        partial = partial and not _is_over(result[0])
        return _called(super().parse_result(result, partial=partial), result[0])


class JsonCallParser(_CallParser, JsonOutputKeyToolsParser):
    """The arguments of a call."""


class InstanceCallParser(_CallParser, PydanticToolsParser):
    """A call's arguments as an instance of a pydantic class."""


def _whole(generation: Generation) -> Generation:
    """The answer with nothing but its JSON as text; `OutputParserException` if there is none.

    A refusal has no text, and LangChain's parsers have an error of their own for it.
    """
    text, cut = generation.text, _CUT.get(_finish_reason(generation) or "")
    if not text.strip() and cut is None:
        return generation
    try:
        found = _found(text) if cut is None else _alone(text)
    except (ValueError, RecursionError) as error:
        raise _unusable(cut or "this is no JSON", text) from (None if cut else error)
    return generation.model_copy(update={"text": found})


def _found(text: str) -> str:
    """The JSON of an answer that ended by itself, which may speak around it as LangChain allows.

    That is: after an object or array, and before and after a fence.
    """
    start, fence = text.lstrip(_AROUND), _FENCE.search(text)
    try:
        return _first(start)
    except ValueError:
        if fence is None:
            raise
    return _first(text[fence.end() :].lstrip(_AROUND))


def _first(text: str) -> str:
    """The JSON that `text` begins with; a value that has no end of its own must be all of it."""
    value, end = _DECODER.raw_decode(text)
    if text[end:].strip(_AROUND) and not isinstance(value, dict | list):
        raise ValueError("text follows the value")
    return text[:end]


def _alone(text: str) -> str:
    """The JSON of an answer that was cut off: nothing but white space and a fence around it."""
    fence = _FENCE.match(text.lstrip())
    inner = text.lstrip()[fence.end() :].rstrip(_AROUND) if fence else text
    value = _DECODER.decode(inner)
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError("more digits may have followed")
    return inner


def _called(parsed: Any, generation: Generation) -> Any:
    """`parsed`, unless there is nothing and the answer shows why."""
    reason = _finish_reason(generation)
    if parsed is not None or reason is None or not isinstance(generation, ChatGeneration):
        return parsed
    message = generation.message
    broken = message.invalid_tool_calls if isinstance(message, AIMessage) else []
    if reason in _CUT or broken:
        written = "".join(str(call["args"]) for call in broken) or generation.text
        raise _unusable(_CUT.get(reason, "the arguments of its call are no JSON object"), written)
    return None


def _unusable(why: str, text: str) -> OutputParserException:
    shown = text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
    return OutputParserException(
        f"the answer cannot be read: {why}. It was {shown!r}", llm_output=text
    )


def _is_over(generation: Generation) -> bool:
    return _finish_reason(generation) is not None


def _finish_reason(generation: Generation) -> str | None:
    """Only the last piece of a stream has one."""
    if not isinstance(generation, ChatGeneration):
        return None
    reason = generation.message.response_metadata.get("finish_reason")
    return reason if isinstance(reason, str) else None
