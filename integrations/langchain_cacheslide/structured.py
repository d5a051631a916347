"""Answers that are data.

In: a schema as a pydantic class, a TypedDict or a JSON schema. Out: what to bind to a model, and
the parser that makes an instance of the schema of its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from cacheslide_agents.errors import RequestError
from langchain_cacheslide.binding import Schema, ToolLike, json_schema, openai_tool
from langchain_cacheslide.parsers import (
    InstanceCallParser,
    InstanceParser,
    JsonCallParser,
    JsonParser,
)

Method = Literal["json_schema", "function_calling", "json_mode"]
_NAME = "answer"


def check_method(method: str, schema: Schema | None, tools: Sequence[ToolLike] | None) -> None:
    """`RequestError` for a method there is not, or one that cannot do what it should."""
    if method not in get_args(Method):
        known = ", ".join(get_args(Method))
        raise RequestError(f"with_structured_output, method={method!r}: known are {known}")
    if schema is None and method != "json_mode":
        raise RequestError(f"with_structured_output, method={method!r} needs a schema")
    if tools and method == "function_calling":
        raise RequestError(
            "with_structured_output: tools= and method='function_calling' exclude each other, for "
            "the schema would be one more tool; use method='json_schema'"
        )


def binding(method: str, schema: Schema | None, strict: bool | None) -> dict[str, Any]:
    """The keyword arguments of the call, `ls_structured_output_format` for LangChain's traces."""
    kwargs = {"method": method} if strict is None else {"method": method, "strict": strict}
    bound: dict[str, Any] = {}
    if schema is not None and _is_traceable(schema):
        bound["ls_structured_output_format"] = {"kwargs": kwargs, "schema": schema}
    if strict is not None:
        bound["strict"] = strict
    if method != "function_calling":
        return {**bound, "response_format": _response_format(method, schema, strict)}
    tool = openai_tool(schema)  # type: ignore[arg-type]
    choice = tool["function"]["name"]
    return {**bound, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}


def parser(method: str, schema: Any, *, with_tools: bool) -> Runnable[Any, Any]:
    """What makes an instance of `schema` of an answer.

    With tools, an answer that calls them stays the message it is.
    """
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if pydantic:
            return InstanceCallParser(tools=[schema], first_tool_only=True)
        name = openai_tool(schema)["function"]["name"]
        return JsonCallParser(key_name=name, first_tool_only=True)
    reader = InstanceParser(pydantic_object=schema) if pydantic else JsonParser()
    if not with_tools:
        return reader
    return RunnableBranch((_calls_tools, RunnablePassthrough()), reader)


def with_raw(model: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """`{"raw", "parsed", "parsing_error"}`; nothing is raised for an answer that cannot be read."""

    def read(kept: dict[str, Any]) -> dict[str, Any]:
        with _told(kept) as told:
            told["parsed"] = parser.invoke(kept["raw"])
        return told

    async def aread(kept: dict[str, Any]) -> dict[str, Any]:
        with _told(kept) as told:
            told["parsed"] = await parser.ainvoke(kept["raw"])
        return told

    return {"raw": model} | RunnableLambda(read, afunc=aread)


@contextmanager
def _told(kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`kept`, to be completed; what goes wrong meanwhile stands in it."""
    told = {**kept, "parsed": None, "parsing_error": None}
    try:
        yield told
    except Exception as error:
        told["parsing_error"] = error


def _is_traceable(schema: Any) -> bool:
    """LangChain converts the schema again for its traces, and survives `ValueError` only."""
    try:
        convert_to_json_schema(schema)
    except Exception:  # the conversion runs the caller's own classes
        return False
    return True


def _response_format(method: str, schema: Schema | None, strict: bool | None) -> dict[str, Any]:
    """`json_schema` and `json_mode` in OpenAI's words."""
    found = None if schema is None else json_schema(schema)
    if method == "json_mode":
        # More than OpenAI's JSON mode promises: where the schema is known it is kept to.
        return (
            {"type": "json_object"} if found is None else {"type": "json_object", "schema": found}
        )
    named: dict[str, Any] = {"name": str((found or {}).get("title", _NAME)), "schema": found}
    if strict is not None:
        named["strict"] = strict
    return {"type": "json_schema", "json_schema": named}


def _calls_tools(message: Any) -> bool:
    return isinstance(message, AIMessage) and bool(message.tool_calls)
