"""How a model family writes tool calls, and grammars that hold it to that.

In: what a chat template renders for a call; tool schemas and what the caller wants. Out: the
`CallFormat` to read answers by, and a `Grammar` under which every call is valid.

| format | a call | where |
| --- | --- | --- |
| `hermes` | `<tool_call>{"name", "arguments"}</tool_call>` | Qwen, Hermes, and our own text |
| `mistral` | `[{"name", "arguments"}, ...]`, after the special token `[TOOL_CALLS]` | Mistral |
| `llama3` | `{"name", "parameters"}`, one an answer | Llama 3 |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cacheslide_agents.errors import RequestError
from cacheslide_agents.sampling import Grammar

Format = dict[str, Any]
"""A node of an XGrammar structural tag."""

CALL_TOKEN = "[TOOL_CALLS]"
"""Mistral's special token before calls; it is no part of an answer's text."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`marker`: the text at which calls begin. `skipped`: how much of it precedes the JSON.

    `end`: the text after the last call of a group; empty where the JSON itself is the end.
    `opening`: the id of a special token with which the model begins calls, if it has one.
    """

    name: Literal["hermes", "mistral", "llama3"]
    marker: str
    skipped: int
    end: str
    several: bool = True
    opening: int | None = None


HERMES = CallFormat("hermes", "<tool_call>", len("<tool_call>"), "</tool_call>")
MISTRAL = CallFormat("mistral", '[{"name": "', len("["), "]")
LLAMA3 = CallFormat("llama3", '{"name": "', 0, "", several=False)


def recognised(rendered: str, special: Mapping[str, int]) -> CallFormat | None:
    """The format of a call as a chat template rendered it; `None` for one we do not know.

    `special`: the ids of the tokenizer's special tokens.
    """
    if "<tool_call>\n{" in rendered:
        return HERMES
    if CALL_TOKEN in rendered and '[{"' in rendered:
        return replace(MISTRAL, opening=special.get(CALL_TOKEN))
    if '{"name": "' in rendered and '"parameters": {' in rendered:
        return LLAMA3
    return None


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller wants of an answer.

    `choice`: `auto` (text or calls), `none` (text), `required` (calls), or the one function to
    call, as `name:...`. `schema`: what an answer in text must match, if anything.
    """

    choice: str = "auto"
    parallel: bool = True
    schema: Mapping[str, Any] | None = None


def call_grammar(style: CallFormat, tools: Sequence[Mapping[str, Any]], wish: Wish) -> Grammar:
    """A grammar whose every answer is as wished. `RequestError` for a function not among `tools`.

    `tools` are in OpenAI's form.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if wish.choice.startswith("name:"):
        name = wish.choice.removeprefix("name:")
        if name not in functions:
            known = ", ".join(functions) or "none"
            raise RequestError(f"tool_choice={name!r} names no bound tool; known: {known}")
        functions = {name: functions[name]}
    return _structural(_answer(style, list(functions.values()), wish))


def _answer(style: CallFormat, functions: list[Mapping[str, Any]], wish: Wish) -> Format:
    if wish.choice == "none":
        text = {"type": "any_text", "excludes": [style.marker]}
        return text if wish.schema is None else _json(wish.schema)
    several = wish.parallel and style.several
    tags = [_tag(style, function, functions if several else []) for function in functions]
    once = {"tags": tags, "stop_after_first": not several or style.name == "mistral"}
    if wish.choice == "auto" and wish.schema is None:
        return _opened(style, {"type": "triggered_tags", "triggers": [style.marker], **once})
    calls = _opened(
        style, {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, **once}
    )
    if wish.choice == "auto" and wish.schema is not None:
        return {"type": "or", "elements": [_json(wish.schema), calls]}
    return calls


def _opened(style: CallFormat, answer: Format) -> Format:
    """`answer`, which may begin with the style's special token."""
    if style.opening is None:
        return answer
    token = {"type": "token", "token": style.opening}
    space = {"type": "optional", "content": {"type": "const_string", "value": " "}}
    opening = {"type": "optional", "content": {"type": "sequence", "elements": [token, space]}}
    return {"type": "sequence", "elements": [opening, answer]}


def _tag(style: CallFormat, function: Mapping[str, Any], others: list[Mapping[str, Any]]) -> Format:
    """The call of one function, its name spelt out; in Mistral's list, `others` may follow."""
    arguments = _arguments(function)
    begin, end = _head(style, function), "}"
    if style.name == "hermes":
        begin, end = f"<tool_call>\n{begin}", "}\n</tool_call>"
    if style.name == "mistral":
        begin, end = f"[{begin}", "}]"
        more = [_sequence("}, " + _head(style, other), _arguments(other)) for other in others]
        if more:
            again = {"type": "star", "content": {"type": "or", "elements": more}}
            arguments = {"type": "sequence", "elements": [arguments, again]}
    return {"type": "tag", "begin": begin, "content": arguments, "end": end}


def _head(style: CallFormat, function: Mapping[str, Any]) -> str:
    key = "parameters" if style.name == "llama3" else "arguments"
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '


def _sequence(text: str, then: Format) -> Format:
    return {"type": "sequence", "elements": [{"type": "const_string", "value": text}, then]}


def _arguments(function: Mapping[str, Any]) -> Format:
    return _json(function.get("parameters") or _NO_ARGUMENTS)


def _json(schema: Mapping[str, Any]) -> Format:
    # Unbounded white space is where a weak model gets lost.
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": 1}


def _structural(answer: Format) -> Grammar:
    try:
        source = json.dumps({"type": "structural_tag", "format": answer}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tool schemas must be JSON data: {error}") from error
    return Grammar("structural_tag", source)
