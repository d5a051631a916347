"""Paths as people write them.

In: a path that may begin with `~`. Out: the path it means.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path

from cacheslide_agents.errors import RequestError


def expanded(path: str | PathLike[str], name: str) -> Path:
    """`path` with its `~` replaced; `RequestError`, which calls it `name`, if that is nobody's."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RequestError(
            f"{name}={fspath(path)!r} is no path ({error}); write it out from the root"
        ) from error


def short_name(model: str | PathLike[str]) -> str:
    """A model's name for people: a folder's own, else the alias or hub id that was given."""
    path = expanded(model, "model")
    return path.name if path.exists() else fspath(model)
