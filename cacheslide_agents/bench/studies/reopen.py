"""The same model again, loaded with other options.

In: a backend that was loaded from files. Out: another one with a store and options of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from cacheslide_agents.backend import Backend, load_backend
from cacheslide_agents.errors import BackendError


@runtime_checkable
class FromFiles(Protocol):
    """What the torch backend tells of where it came from."""

    @property
    def path(self) -> str | Path: ...
    @property
    def device(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


@runtime_checkable
class Settles(Protocol):
    """A backend with idle work."""

    def settle(self, timeout: float | None = None) -> bool: ...


@contextmanager
def reopened(backend: Backend, **options: Any) -> Iterator[Backend]:
    """A torch backend of the same weights, device and dtype with other `options`; closed after."""
    if not isinstance(backend, FromFiles):
        raise BackendError(f"{backend.model_id} cannot be loaded again; use the torch backend")
    again = load_backend(
        "torch",
        model=str(backend.path),
        device=str(backend.device),
        dtype=backend.dtype,
        **options,
    )
    try:
        yield again
    finally:
        again.close()


def settle(backend: Backend) -> None:
    """Wait until a backend's idle work is done."""
    cast(Settles, backend).settle()
