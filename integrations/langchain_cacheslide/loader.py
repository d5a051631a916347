"""Which backend answers a chat model's calls.

In: a backend's name, a model and options; or a server's address. Out: the backend or the client,
made at the first call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage
from pydantic import SecretStr

from cacheslide_agents.backend import Backend, load_backend
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.wire import ChunkPlans
from langchain_cacheslide.messages import read_messages
from langchain_cacheslide.shelf import Shelf

if TYPE_CHECKING:
    from langchain_cacheslide.remote import RemoteChat


class BackendLoader:
    """Loads each (backend, model, options) once and hands out that one from then on.

    Models that share a loader share weights and cached contexts; copies of a model do so by
    themselves. Safe to call from several threads: the first caller loads, and only those that want
    the same one wait. `plans` is the side channel of chunk plans for all of them.
    """

    def __init__(self) -> None:
        self.plans = ChunkPlans()
        self._backends: Shelf[Backend] = Shelf()
        self._servers: Shelf[RemoteChat] = Shelf()
        self._encoders: Shelf[ChatEncoder] = Shelf()

    def get(self, name: str, model: str | None, options: Mapping[str, Any]) -> Backend:
        """The backend `name` with `model` (`None`: the backend's own default) and `options`."""
        named = {} if model is None else {"model": model}
        return self._backends.get(
            (name, model, dict(options)), lambda: load_backend(name, **named, **options)
        )

    def server(self, base_url: str, api_key: SecretStr | None, model: str | None) -> RemoteChat:
        """The client of a server's model, one for all calls."""
        # The client's packages are needed by nobody who computes at home.
        from langchain_cacheslide.remote import RemoteChat

        address = (base_url, api_key, model)
        return self._servers.get(address, lambda: RemoteChat(*address, cut=self._cut))

    def _cut(
        self,
        messages: Sequence[BaseMessage],
        task: str | None,
        tools: Sequence[Any] | None,
        namespace: str,
    ) -> ChunkedPrompt:
        return read_messages(messages, task, self.plans, namespace).prompt

    def encoder(self, tokenizer: Any) -> ChatEncoder:
        """The one encoder of a tokenizer, which takes longer to prepare than a prompt to encode."""
        # An encoder holds its tokenizer, so that no other one has its id as long as it is kept.
        return self._encoders.get(id(tokenizer), lambda: ChatEncoder(tokenizer))

    def close(self) -> None:
        """Close every loaded backend; the next call loads anew."""
        self._encoders.clear()
        self._servers.clear()
        self._backends.clear(lambda backend: backend.close())

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendLoader:
        """A copied model keeps answering from the same weights and contexts."""
        return self

    def __reduce__(self) -> tuple[type[BackendLoader], tuple[()]]:
        """Weights do not travel in a pickle: the other process loads its own."""
        return (BackendLoader, ())
