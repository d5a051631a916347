"""Function calls as the text of an answer, for agents that act through functions only.

In: tools; a model's answer. Out: the JSON schema of one call, for constrained decoding; the call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from langchain_core.messages import ToolCall
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool


def _whole_number(digits: str) -> int:
    """Checkpoints hold numbers of 64 bits; a call with a longer one is none."""
    number = int(digits)
    if number.bit_length() > 63:
        raise ValueError(f"{digits} is out of range")
    return number


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def function_schemas(tools: Sequence[BaseTool]) -> list[dict[str, Any]]:
    """`{name, description, parameters}` of each tool, as templates list them."""
    return [convert_to_openai_tool(tool)["function"] for tool in tools]


def call_format(tools: Sequence[BaseTool]) -> dict[str, Any]:
    """A `response_format` that lets nothing pass but one call of one of `tools`."""
    one_of = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": {**function["parameters"], "additionalProperties": False},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in function_schemas(tools)
    ]
    schema = {"name": "function_call", "schema": {"anyOf": one_of}, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def parsed_call(text: str) -> ToolCall | None:
    """The first JSON object in `text` that has a name and arguments, if any."""
    start = text.find("{")
    while start >= 0:
        try:
            found, _ = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            found = None
        if _is_call(found):
            return ToolCall(
                name=found["name"],
                args=found["arguments"],
                id=f"call_{uuid4().hex}",
                type="tool_call",
            )
        start = text.find("{", start + 1)
    return None


def _is_call(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("name"), str)
        and isinstance(found.get("arguments"), dict)
    )
