"""Paths as people write them.

In: a path, perhaps relative, perhaps with a `~`. Out: the place it means now, from the root, so
that it stays the same place wherever the process goes; `RequestError` for what names no place.
"""

from __future__ import annotations

from os import PathLike, fsencode, fspath
from pathlib import Path

from cacheslide_agents.errors import RequestError


def expanded(path: str | PathLike[str], name: str) -> Path:
    """`path` from the root, its `~` replaced; an error calls it `name`.

    An empty path is refused: it is a variable that was not set, never the folder one is in.
    """
    try:
        written = fspath(path)
    except TypeError:
        written = None
    if not isinstance(written, str):
        raise RequestError(f"{name}={path!r} is no path; give one as text")
    if not written:
        raise RequestError(f"{name}='' names no place; '.' is the folder you are in")
    try:
        if b"\0" in fsencode(written):
            raise ValueError("it holds a NUL")
        return Path(written).expanduser().absolute()
    except (RuntimeError, ValueError, OSError) as error:
        raise RequestError(
            f"{name}={written!r} is no path ({error}); write it out from the root"
        ) from error


def short_name(model: str | PathLike[str]) -> str:
    """A model's name for people: a folder's own, else the alias or hub id that was given."""
    path = expanded(model, "model")
    return path.name if path.exists() else fspath(model)
