"""JSON schemas made ready for the grammar engine, which misreads a few keywords and skips others.

In: a parsed JSON schema. Out: one whose grammar gives valid JSON, and the places of the keywords
that the grammar does not enforce, for the log. What would constrain nothing at all is refused.
"""

from __future__ import annotations

import re
from typing import Any

from cacheslide_agents.errors import RequestError

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")
_SKIPPED = (
    "not",
    "uniqueItems",
    "contains",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
)
_QUOTED = re.compile(r'"|\\\\')
"""In a pattern: characters that JSON must escape, which the engine would write as they are."""


def prepared(schema: Any) -> tuple[Any, list[str]]:
    """`schema` for the engine, and what it leaves unchecked, as `#/path: keyword`."""
    unchecked: list[str] = []
    return _walk(schema, "#", unchecked), unchecked


def _walk(schema: Any, path: str, unchecked: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    ready = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            ready[key] = {k: _walk(v, f"{path}/{key}/{k}", unchecked) for k, v in value.items()}
        elif key in _LISTS and isinstance(value, list):
            ready[key] = [_walk(v, f"{path}/{key}/{n}", unchecked) for n, v in enumerate(value)]
        elif key in _SINGLE:
            ready[key] = _walk(value, f"{path}/{key}", unchecked)
    unchecked += [f"{path}: {key}" for key in _SKIPPED if key in schema]
    _require_one(schema, path)
    _name_required(ready)
    _bound_string(ready, path, unchecked)
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


def _bound_string(ready: dict[str, Any], path: str, unchecked: list[str]) -> None:
    """Bounds become a pattern: the engine's own bounded strings may hold control characters."""
    pattern = ready.get("pattern")
    if isinstance(pattern, str) and _QUOTED.search(pattern):
        unchecked.append(f"{path}: pattern")
        del ready["pattern"]
        pattern = None
    bounds = [key for key in ("minLength", "maxLength") if key in ready]
    least, most = ready.pop("minLength", 0), ready.pop("maxLength", "")
    if pattern is not None or "format" in ready:
        unchecked += [f"{path}: {key}" for key in bounds]
    elif bounds:
        ready["pattern"] = rf'^[^\x00-\x1f"\\]{{{least},{most}}}$'
