"""What makes data of an answer, and takes no half answer for a whole one.

In: a message, or the pieces of one. Out: an instance of the schema; of a stream, also what there is
of it so far. LangChain's own parsers mend JSON that breaks off, as a stream needs it: a number that
`max_tokens` cut in two would be a number still. Here the end of an answer is read strictly.
"""

from __future__ import annotations

import json
from functools import partial as bound
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.json import parse_json_markdown

_CUT = {"length": "max_tokens cut it off; raise max_tokens", "cancelled": "it was cancelled"}
"""Finish reasons of answers that are not whole."""
_read = bound(parse_json_markdown, parser=bound(json.loads, strict=False))


class JsonParser(JsonOutputParser):
    """Any JSON value."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if partial and not _is_over(result[0]):
            return super().parse_result(result, partial=True)
        _expect_whole(result[0])
        return super().parse_result(result)


class InstanceParser(PydanticOutputParser[Any]):
    """An instance of a pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if partial and not _is_over(result[0]):
            return super().parse_result(result, partial=True)
        _expect_whole(result[0])
        return super().parse_result(result)


class JsonCallParser(JsonOutputKeyToolsParser):
    """The arguments of a call; `None` for an answer that calls nothing."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        partial = partial and not _is_over(result[0])
        return _called(super().parse_result(result, partial=partial), result[0])


class InstanceCallParser(PydanticToolsParser):
    """A call's arguments as an instance of a pydantic class; `None` where nothing is called."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        partial = partial and not _is_over(result[0])
        return _called(super().parse_result(result, partial=partial), result[0])


def _expect_whole(generation: Generation) -> None:
    """`OutputParserException` for text that is not JSON from its first character to its last.

    A refusal has no text, and LangChain's parsers have an error of their own for it.
    """
    text, cut = generation.text, _CUT.get(_finish_reason(generation) or "")
    if not text.strip() and cut is None:
        return
    try:
        value = _read(text)
    except (ValueError, RecursionError) as error:
        why = cut or "this is no JSON"
        raise _unusable(why, text) from (None if cut else error)
    if cut is not None and isinstance(value, int | float) and not isinstance(value, bool):
        raise _unusable(cut, text)  # more digits may have followed


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
