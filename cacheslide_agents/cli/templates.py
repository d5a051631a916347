"""Templates and their values as a command line names them.

In: a template's name or file, a JSON file or stdin. Out: a template, and a mapping of values.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cacheslide_agents.errors import DataError
from cacheslide_agents.foreign_json import parsed
from cacheslide_agents.prompt.template import SUFFIX, PromptTemplate


def find_template(name: str) -> PromptTemplate:
    """A file when it looks like one (a suffix `.jinja`, a folder, or it exists), else by name."""
    path = Path(name)
    if path.suffix == SUFFIX or path.name != name or _is_file(path):
        return PromptTemplate.from_file(path)
    return PromptTemplate.named(name)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name for a file
        return False


def read_values(source: str) -> dict[str, Any]:
    """The JSON object in file `source`, or on stdin for `-`; `DataError` if there is none."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{source}: values cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: values are not JSON: {error}") from error
    values = parsed(text, source, wrong="values are not JSON")
    if not isinstance(values, dict):
        raise DataError(f"{source}: values must be a JSON object, not a {type(values).__name__}")
    return values
