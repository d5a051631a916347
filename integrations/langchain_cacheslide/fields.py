"""The settings of the chat model.

In: keyword arguments and environment variables. Out: checked fields; secrets stay out of dumps.
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.utils import from_env, secret_from_env
from pydantic import ConfigDict, Field, SecretStr

from cacheslide_agents.backend import Backend
from cacheslide_agents.errors import RequestError
from langchain_cacheslide import parameters
from langchain_cacheslide.loader import BackendLoader


class ChatFields(BaseChatModel):
    """Every setting, and whether they fit together."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str | None = Field(default_factory=from_env("CACHESLIDE_MODEL", default=None))
    """Alias, local directory or hub id, or the server's name for it; `None` takes the default.
    Environment: `CACHESLIDE_MODEL`."""
    backend: Any = Field(default_factory=from_env("CACHESLIDE_BACKEND", default="torch"))
    """The name of an installed backend, or a `Backend` (which then says what the model is); `None`
    where a server answers.
    Environment: `CACHESLIDE_BACKEND`."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the backend's constructor: `device`, `dtype`, budgets."""
    base_url: str | None = Field(default_factory=from_env("CACHESLIDE_BASE_URL", default=None))
    """A server that speaks OpenAI's API (`http://host:8000/v1`), asked instead of a backend.
    Environment: `CACHESLIDE_BASE_URL`; a `backend` that is given wins over the variable."""
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env("CACHESLIDE_API_KEY", default=None)
    )
    """For the server. Environment: `CACHESLIDE_API_KEY`."""
    loader: BackendLoader = Field(default_factory=BackendLoader, exclude=True, repr=False)
    """Give several models one loader and they share weights, cached contexts and chunk plans."""

    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    n: int = 1
    """Answers to one prompt, which share its prefill; `generate` returns them all."""
    num_beams: int = 1
    """Above 1: beam search; the `n` best beams are the answers."""
    length_penalty: float = 1.0
    logprobs: bool = False
    """Log-probabilities in `response_metadata["logprobs"]`, in OpenAI's shape."""
    top_logprobs: int | None = None
    timeout: float | None = None
    """Seconds for the whole answer, whoever gives it; `None` sets no limit."""
    max_retries: int = 2
    """For a server; a backend in this process has nothing that a second try would mend."""
    streaming: bool = False
    """LangChain's switch: `True` also streams to callbacks where the caller wants one answer."""

    namespace: str = "default"
    """Isolation key: nothing is reused across namespaces."""
    task: str | None = None
    """Kind of prompt; `None` takes the template's name, or "default"."""
    session: str | None = None
    """Hint that names one agent's run."""
    reuse: bool = True
    """`False` computes every prompt densely (for judges and critics)."""
    policy: Any = None
    """A policy or its name; `None` takes the backend's default."""

    @property
    def is_remote(self) -> bool:
        """Whether a server answers."""
        return self.base_url is not None

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in parameters.SETTINGS}

    def _settle_place(self) -> None:
        """Keep one of `base_url` and `backend`, so that a model made of this one's fields asks in
        the same place. `RequestError` if it is not clear who should answer.
        """
        given = self.model_fields_set
        if self.base_url is not None and "backend" in given and self.backend is not None:
            if "base_url" in given:
                raise RequestError("base_url and backend exclude each other; leave one of them out")
            self.base_url = None
        if self.base_url is not None:
            self.backend = None
        elif not isinstance(self.backend, str):
            self._check_backend()

    def _check_backend(self) -> None:
        if not isinstance(self.backend, Backend):
            raise RequestError(
                f"backend={self.backend!r} must be a backend's name or a Backend instance"
            )
        if "model" in self.model_fields_set:
            self._check_model_of(self.backend, self.model)

    def _check_model_of(self, backend: Backend, model: str | None) -> None:
        if model not in (None, backend.model_id):
            raise RequestError(
                f"model={model!r} does not name the model of the given backend, "
                f"{backend.model_id!r}; leave `model` out"
            )
