"""A backend for the length of one command.

In: the options that name it. Out: the loaded backend, closed when the command ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cacheslide_agents.backend import Backend, load_backend
from cacheslide_agents.cli.console import waiting
from cacheslide_agents.errors import RequestError


@contextmanager
def opened(
    backend: str, model: str, settings: Sequence[str] | None = None, **options: Any
) -> Iterator[Backend]:
    """`options` that are `None` are left to the backend; `settings` are those of --set."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in map(_setting, settings or ()):
        if name == "model" or name in options:
            raise RequestError(f"--set {name}=... has an option of its own: --{name}")
        given[name] = value
    with waiting(f"loading {model}"):
        loaded = load_backend(backend, model=model, **given)
    try:
        yield loaded
    finally:
        loaded.close()


def _setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE; a value that is no JSON is text, and so is one too large to be read as JSON."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise RequestError(f"--set {text!r} must be NAME=VALUE, e.g. --set enforce_eager=true")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
