"""Which backend answers a chat model's calls.

In: a backend's name, a model and options; or a server's address. Out: the backend or the client,
made at the first call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage
from pydantic import SecretStr

from cacheslide_agents.backend import Backend, load_backend
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.wire import ChunkPlans
from langchain_cacheslide.messages import read_messages

if TYPE_CHECKING:
    from langchain_cacheslide.remote import RemoteChat

_Key = tuple[str, str | None, dict[str, Any]]
_Address = tuple[str, SecretStr | None, str | None]


class BackendLoader:
    """Loads each (backend, model, options) once and hands out that one from then on.

    Models that share a loader share weights and cached contexts; copies of a model do so by
    themselves. Safe to call from several threads: the first caller loads, the others wait.
    `plans` is the side channel of chunk plans for all of them.
    """

    def __init__(self) -> None:
        self.plans = ChunkPlans()
        self._lock = Lock()
        self._servers: list[tuple[_Address, RemoteChat]] = []
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

    def server(self, base_url: str, api_key: SecretStr | None, model: str | None) -> RemoteChat:
        """The client of a server's model, one for all calls."""
        # The client's packages are needed by nobody who computes at home.
        from langchain_cacheslide.remote import RemoteChat

        with self._lock:
            address = (base_url, api_key, model)
            for known, server in self._servers:
                if known == address:
                    return server
            server = RemoteChat(*address, cut=self._cut)
            self._servers.append((address, server))
            return server

    def _cut(
        self, messages: Sequence[BaseMessage], task: str | None, tools: Sequence[Any] | None
    ) -> ChunkedPrompt:
        return read_messages(messages, task, self.plans).prompt

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
            self._servers.clear()
            while self._loaded:
                self._loaded.pop()[1].close()

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendLoader:
        """A copied model keeps answering from the same weights and contexts."""
        return self

    def __reduce__(self) -> tuple[type[BackendLoader], tuple[()]]:
        """Weights do not travel in a pickle: the other process loads its own."""
        return (BackendLoader, ())
