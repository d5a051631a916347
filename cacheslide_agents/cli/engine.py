"""A backend for the length of one command.

In: the options that name it. Out: the loaded backend, closed when the command ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cacheslide_agents.backend import Backend, load_backend
from cacheslide_agents.cli.console import notes


@contextmanager
def opened(backend: str, model: str, **options: Any) -> Iterator[Backend]:
    """`options` that are `None` are left to the backend."""
    given = {name: value for name, value in options.items() if value is not None}
    with notes().status(f"loading {model}"):
        loaded = load_backend(backend, model=model, **given)
    try:
        yield loaded
    finally:
        loaded.close()
