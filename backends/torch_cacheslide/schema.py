"""JSON schemas made ready for the grammar engine, which misreads a few keywords and skips others.

In: a parsed JSON schema. Out: one that the engine reads as it is meant, and the places of the
keywords that its grammar does not enforce, for the log; and that grammar, for valid JSON only. What
would constrain nothing at all, or take minutes to compile, is refused.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from cacheslide_agents.errors import RequestError

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items",
    "unevaluatedItems",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
)
_SKIPPED = (
    "not",
    "uniqueItems",
    "contains",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
_PIECE = re.compile(
    r"""\[(?:\\.|[^\\\]])*\]              # a class; `[]` and `[^]` are whole, as in ECMAScript
    | \\(?:x..|u\{\w*\}|u....|.)        # an escape
    | \(\?(?![:<]) | \(\?<(?=[=!])       # where a group begins that looks around or sets flags
    | .""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(
    r"""["\x00-\x1f]
    | \\(?: [\\nrtfv0c] | (?:x|u00)(?:22|5[cC]|[01]) | u\{0*(?:22|5[cC]|1?[0-9a-fA-F])\} )""",
    re.VERBOSE,
)
"""In a piece of a pattern: a character that JSON must escape."""
_INSTEAD = ("const", "enum", "$ref", "anyOf", "oneOf", "allOf")
"""Where one of these stands, the engine reads no rule beside it."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pattern", "minLength", "maxLength"), ("string",)),
    **dict.fromkeys(_NUMBERS, ("integer", "number")),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
}
_BOUNDED = re.compile(r'^(\w+ ::= \(\()\[\^\\"\\\\\\r\\n\](\)\))$', re.MULTILINE)
"""The engine's rule of the characters of a string whose length is bounded."""
_JSON_CHARACTERS = r"[^\x00-\x1f\"\\]"
MOST_SPELLED = 16_000
"""Characters of an enum, common beginnings counted once: beyond 2 ** 14 or so the engine takes
minutes instead of a second."""
MOST_SPACES = 1
"""White space in a row between JSON tokens; without a bound, small models never stop writing it."""


def prepared(schema: Any) -> tuple[Any, list[str]]:
    """`schema` for the engine, and what it leaves unchecked, as `#/path: keyword`."""
    unchecked: list[str] = []
    return _walk(schema, "#", unchecked), unchecked


def rules_of(schema: Any, spaces: Any = MOST_SPACES) -> str:
    """The engine's grammar of a prepared schema, as EBNF; raises what the engine does.

    At most `spaces` stand in a row between tokens. The engine's strings of bounded length may hold
    control characters, which JSON must escape; here they may not. To say that in a pattern instead
    takes a hundred times as long to compile.
    """
    from xgrammar import Grammar

    rules = str(Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=spaces))
    return _BOUNDED.sub(lambda found: f"{found[1]}{_JSON_CHARACTERS}{found[2]}", rules)


def _walk(schema: Any, path: str, unchecked: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    ready = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            ready[key] = {k: _walk(v, f"{path}/{key}/{k}", unchecked) for k, v in value.items()}
        elif key in _LISTS and isinstance(value, list):
            ready[key] = [_walk(v, f"{path}/{key}/{n}", unchecked) for n, v in enumerate(value)]
        elif key == "propertyNames" and isinstance(value, dict):
            ready[key] = _walk({"type": "string", **value}, f"{path}/{key}", unchecked)
        elif key in _SINGLE:
            ready[key] = _walk(value, f"{path}/{key}", unchecked)
    unchecked += [f"{path}: {key}" for key in _SKIPPED if key in schema]
    _require_one(schema, path)
    _require_few(schema, path)
    _name_required(ready)
    _keep_to_kinds(ready, path, unchecked)
    _open_arrays(ready)
    _keep_to_strings(ready, path, unchecked)
    _check_names(schema, path, unchecked)
    if isinstance(schema.get("$ref"), str) and not schema["$ref"].startswith("#"):
        unchecked.append(f"{path}: $ref")
    return ready


def _require_one(schema: dict[str, Any], path: str) -> None:
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        raise RequestError(
            f"{path}: allOf of {len(several)} schemas is not handled by grammars; merge them"
        )


def _name_required(ready: dict[str, Any]) -> None:
    """A required property must be declared, or the engine forgets that it is required."""
    required, known = ready.get("required"), ready.get("properties", {})
    if isinstance(required, list) and isinstance(known, dict):
        others: dict[str, Any] = {
            name: {} for name in required if isinstance(name, str) and name not in known
        }
        if others:
            ready["properties"] = {**known, **others}


def _require_few(schema: dict[str, Any], path: str) -> None:
    values = schema.get("enum")
    if isinstance(values, list):
        spelled = sorted(json.dumps(value, ensure_ascii=False) for value in values)
        shared = sum(_shared(*pair) for pair in pairwise(spelled))
        if (characters := sum(map(len, spelled)) - shared) > MOST_SPELLED:
            raise RequestError(
                f"{path}: enum of {len(values)} values has {characters} characters to tell them "
                f"apart, and grammars handle {MOST_SPELLED}; name fewer or shorter ones"
            )


def _shared(one: str, other: str) -> int:
    """Characters of their common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _keep_to_strings(ready: dict[str, Any], path: str, unchecked: list[str]) -> None:
    """Of the rules of one string the engine keeps a pattern, or else a format, or else bounds."""
    given = [key for key in ("pattern", "format", "minLength", "maxLength") if key in ready]
    pattern = str(ready.get("pattern", ""))
    if _writes_escaped(pattern) or _looks_around(pattern):
        _leave_out("pattern", ready, path, unchecked)
        given = given[1:]
    if given and given[0] in ("pattern", "format"):
        for key in ("minLength", "maxLength"):
            if key in ready:
                _leave_out(key, ready, path, unchecked)


def _keep_to_kinds(ready: dict[str, Any], path: str, unchecked: list[str]) -> None:
    """Rules for values of one type are read beside that type alone."""
    kinds = _kinds(ready)
    replaced = any(key in ready for key in _INSTEAD)
    for key, needed in _KINDS.items():
        if key in ready and (replaced or kinds.isdisjoint(needed)):
            _leave_out(key, ready, path, unchecked)


def _kinds(ready: dict[str, Any]) -> set[str]:
    """The types that the engine takes its values to have; none where it takes any."""
    given = ready.get("type", "array" if "items" in ready or "prefixItems" in ready else ())
    return {given} if isinstance(given, str) else set(given)


def _open_arrays(ready: dict[str, Any]) -> None:
    """Items that are not described are any, which the engine does not see beside bounds.

    A tuple ends with its last item, as an object does with its properties, unless its bounds speak
    of more.
    """
    if "array" not in _kinds(ready) or "items" in ready or "unevaluatedItems" in ready:
        return
    first = len(ready.get("prefixItems", ()))
    bounds = [ready[key] for key in ("minItems", "maxItems") if isinstance(ready.get(key), int)]
    if not first or any(bound > first for bound in bounds):
        ready["items"] = {}


def _leave_out(key: str, ready: dict[str, Any], path: str, unchecked: list[str]) -> None:
    unchecked.append(f"{path}: {key}")
    del ready[key]


def _check_names(schema: dict[str, Any], path: str, unchecked: list[str]) -> None:
    for name in schema.get("patternProperties", ()):
        if _writes_escaped(name):
            raise RequestError(
                f"{path}: patternProperties {name!r} holds characters that JSON escapes, which "
                "grammars do not handle; leave it out"
            )
        if _looks_around(name):
            unchecked.append(f"{path}: patternProperties {name}")


def _writes_escaped(pattern: str) -> bool:
    """Whether it asks for characters that JSON escapes, which the engine writes as they are.

    In "all but these" it leaves them out by itself, unless these are none.
    """
    return any(
        piece == "[^]" or (not piece.startswith("[^") and _ESCAPED.search(piece) is not None)
        for piece in _PIECE.findall(pattern)
    )


def _looks_around(pattern: str) -> bool:
    """Whether it has groups that look around or set flags, which the engine passes over."""
    return any(piece.startswith("(?") for piece in _PIECE.findall(pattern))
