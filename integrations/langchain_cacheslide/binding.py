"""What a caller wants of an answer: tools, a choice among them, a format.

In: LangChain's tools, tool choices and response formats of every kind. Out: OpenAI's forms of them,
and the grammar that holds an answer to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.calls import CallFormat, Wish, call_grammar
from cacheslide_agents.sampling import Grammar

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
Schema = Mapping[str, Any] | type

_SCHEMA = {"type", "properties", "$ref", "anyOf"}
"""Keys of which a JSON schema has at least one."""
_MODES = {"auto": "auto", "none": "none", "any": "required", "required": "required"}


@dataclass(frozen=True, slots=True)
class Demand:
    """`tools` and `response_format` in OpenAI's form, `choice` and `parallel` as in `Wish`.

    `answer`: what an answer in text must match, the response format as a grammar.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = True
    answer: Grammar | None = None
    response_format: Mapping[str, Any] | None = None

    @property
    def openai_choice(self) -> str | dict[str, Any]:
        """The choice as OpenAI has it."""
        if not self.choice.startswith("name:"):
            return self.choice
        return {"type": "function", "function": {"name": self.choice.removeprefix("name:")}}

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    @property
    def is_forced(self) -> bool:
        """Whether the answer has a form from its first token on, so that no thought precedes it."""
        return self.answer is not None or self.choice not in ("auto", "none")

    def grammar(self, style: CallFormat) -> Grammar | None:
        """What the answer must match, for a model that writes calls in `style`."""
        if not self.tools:
            return self.answer
        twice = {name for name in self.names if self.names.count(name) > 1}
        if twice:
            raise RequestError(f"two tools are named {', '.join(sorted(twice))}; names must differ")
        if self.answer is not None and self.choice == "none":
            return self.answer
        schema = None if self.answer is None else _schema_of(self.answer)
        return call_grammar(style, self.tools, Wish(self.choice, self.parallel, schema))


def demand(settings: Mapping[str, Any]) -> Demand:
    """What `settings` ask for; `RequestError` for what cannot be had."""
    tools = tuple(openai_tools(settings["tools"]))
    names = [tool["function"]["name"] for tool in tools]
    wanted = openai_format(settings["response_format"])
    answer, grammar = response_grammar(wanted), settings["grammar"]
    if grammar is not None:
        if answer is not None or tools:
            raise RequestError("grammar= stands alone: leave out tools and response_format")
        answer = grammar if isinstance(grammar, Grammar) else Grammar(*grammar)
    choice = tool_choice(settings["tool_choice"], names)
    parallel = settings["parallel_tool_calls"]
    if parallel is None:
        # A forced answer has nothing to end it but the model's own sense; small ones have none.
        parallel = choice == "auto"
    return Demand(tools, choice, bool(parallel), answer, wanted)


def openai_tools(tools: Any) -> list[dict[str, Any]]:
    """All of them; `None` has none. `RequestError` for what is no list of tools."""
    if tools is None:
        return []
    if not isinstance(tools, Iterable) or isinstance(tools, str | bytes | Mapping):
        raise RequestError(f"tools={tools!r:.120} must be a list of tools")
    return [openai_tool(tool) for tool in tools]


def openai_tool(tool: ToolLike) -> dict[str, Any]:
    """`tool` as OpenAI has it. `RequestError` for a schema that cannot be read."""
    try:
        converted = convert_to_openai_tool(tool)
        json.dumps(converted)
    except Exception as error:  # the conversion runs the caller's own classes
        raise RequestError(f"tool {tool!r:.120} cannot be described: {error}") from error
    function = converted.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    parameters = function.get("parameters", {}) if named and function else None
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"tool {tool!r:.120} must have a name, and parameters that are a JSON schema of "
            "type 'object'"
        )
    return converted


def tool_choice(given: Any, names: Sequence[str]) -> str:
    """`given` as `Wish` has it. `RequestError` for a choice that names no tool."""
    if given is None or given is False:
        return "auto"
    if given is True:
        given = "any"
    if isinstance(given, Mapping):
        function = given.get("function")
        given = function.get("name") if isinstance(function, Mapping) else given.get("name", given)
        if given in names:
            return f"name:{given}"
    elif given in names:
        return f"name:{given}"
    elif given in ("auto", "none"):
        return str(given)
    elif given in _MODES and names:
        return _MODES[given]
    known = ", ".join([*_MODES, *names]) if names else "auto, none (no tool is bound)"
    raise RequestError(f"tool_choice={given!r} names no bound tool; known: {known}")


def openai_format(given: Any) -> Mapping[str, Any] | None:
    """A response format, or a schema in its place, as OpenAI has it; `None` for free text."""
    if given is None or given == {"type": "text"}:
        return None
    if not isinstance(given, Mapping) or given.get("type") not in ("json_object", "json_schema"):
        schema = json_schema(given)
        name = str(schema.get("title", "answer"))
        return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    inner = given.get("json_schema")
    if given["type"] == "json_schema" and not (
        isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping)
    ):
        raise RequestError(
            "response_format must look like {'type': 'json_schema', 'json_schema': {'name': ..., "
            f"'schema': {{...}}}}}}, not {given!r:.120}"
        )
    return given


def response_grammar(wanted: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of a response format. A schema that JSON mode is told of is kept to, too."""
    if wanted is None:
        return None
    schema = wanted.get("schema")
    if wanted["type"] == "json_schema":
        schema = wanted["json_schema"]["schema"]
    elif schema is None:
        return Grammar("json_object")
    try:
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a response format must be JSON data: {error}") from error


def json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, a TypedDict or any other form LangChain reads."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        # LangChain's conversion would expand references, which recursive models do not survive.
        describe: Any = getattr(schema, "model_json_schema", None) or getattr(
            schema, "schema", None
        )
        return dict(describe())
    if isinstance(schema, Mapping) and schema.get("type") == "json_schema":
        schema = (openai_format(schema) or {})["json_schema"]["schema"]
    if isinstance(schema, Mapping) and schema.get("type") != "function" and _SCHEMA & {*schema}:
        return dict(schema)
    try:
        return convert_to_json_schema(schema)
    except Exception as error:  # the conversion runs the caller's own classes
        raise RequestError(f"schema {schema!r:.120} cannot be read: {error}") from error


def _schema_of(grammar: Grammar) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    return json.loads(grammar.source) if grammar.kind == "json_schema" else schema
