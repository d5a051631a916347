"""A backend for the length of one command.

In: the options that name it, declared here once. Out: the loaded backend, closed when the command
ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheslide_agents.backend import Backend, load_backend
from cacheslide_agents.cli import options
from cacheslide_agents.cli.console import waiting
from cacheslide_agents.errors import RequestError


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Which backend to load, and how: what is `None` is left to it. `settings`: those of --set."""

    model: str
    name: str
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    profiles: list[Path] | None = None
    settings: Sequence[str] = ()

    def opened(self) -> AbstractContextManager[Backend]:
        """The backend, closed at the end of the block."""
        names = ("device", "dtype", "threads", "profiles")
        given = {name: getattr(self, name) for name in names}
        return opened(self.name, self.model, self.settings, **given)


@contextmanager
def opened(
    backend: str, model: str, settings: Sequence[str] = (), **given: Any
) -> Iterator[Backend]:
    """What of `given` is `None` is left to the backend; `settings` are those of --set."""
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, value in map(_setting, settings):
        if name == "model" or name in given:
            raise RequestError(f"--set {name}=... has an option of its own: --{name}")
        chosen[name] = value
    with waiting(f"loading {model}"):
        loaded = load_backend(backend, model=model, **chosen)
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


def _plain(
    model: options.Model = options.DEFAULT_MODEL,
    backend: options.BackendName = options.DEFAULT_BACKEND,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
) -> BackendOptions:
    return BackendOptions(model, backend, device, dtype, threads)


def _whole(
    model: options.Model = options.DEFAULT_MODEL,
    backend: options.BackendName = options.DEFAULT_BACKEND,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    profiles: options.Profiles = None,
    settings: options.Settings = None,
) -> BackendOptions:
    return BackendOptions(model, backend, device, dtype, threads, profiles, settings or ())


with_backend = options.grouped("backend", _whole)
"""Gives a command all options of a backend, as `BackendOptions`."""
with_plain_backend = options.grouped("backend", _plain)
"""The same without CCPE profiles and without --set."""
with_cope_backend = options.grouped("backend", _plain, model=options.COPE_MODEL)
"""The same for a command whose model must be a converted one."""
