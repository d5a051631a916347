"""Which backend answers a chat model's calls.

In: a backend's name, a model and options. Out: the loaded backend, loaded at the first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from cacheslide_agents.backend import Backend, load_backend
from cacheslide_agents.prompt.chat import ChatEncoder

_Key = tuple[str, str | None, dict[str, Any]]


class BackendLoader:
    """Loads each (backend, model, options) once and hands out that one from then on.

    Models that share a loader share weights and cached contexts; copies of a model do so by
    themselves. Safe to call from several threads: the first caller loads, the others wait.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._loaded: list[tuple[_Key, Backend]] = []
        self._encoders: list[tuple[Any, ChatEncoder]] = []

    def get(self, name: str, model: str | None, options: Mapping[str, Any]) -> Backend:
        """The backend `name` with `model` (`None`: the backend's own default) and `options`."""
        wanted: _Key = (name, model, dict(options))
        with self._lock:
            for key, backend in self._loaded:
                if key == wanted:
                    return backend
            named = {} if model is None else {"model": model}
            backend = load_backend(name, **named, **options)
            self._loaded.append((wanted, backend))
            return backend

    def encoder(self, tokenizer: Any) -> ChatEncoder:
        """The one encoder of a tokenizer, which takes longer to prepare than a prompt to encode."""
        with self._lock:
            for known, encoder in self._encoders:
                if known is tokenizer:
                    return encoder
            encoder = ChatEncoder(tokenizer)
            self._encoders.append((tokenizer, encoder))
            return encoder

    def close(self) -> None:
        """Close every loaded backend; the next call loads anew."""
        with self._lock:
            self._encoders.clear()
            while self._loaded:
                self._loaded.pop()[1].close()

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendLoader:
        """A copied model keeps answering from the same weights and contexts."""
        return self

    def __reduce__(self) -> tuple[type[BackendLoader], tuple[()]]:
        """Weights do not travel in a pickle: the other process loads its own."""
        return (BackendLoader, ())
