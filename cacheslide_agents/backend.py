"""What a model server must do for us, and the values that cross that border.

In: a `GenerationRequest` (token ids, chunk spans, sampling, policy). Out: `GenerationChunk`s, the
last of which carries the `Receipt`: what was reused, what was not, and why.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, Literal, Protocol, Self, TypedDict, Unpack, cast, runtime_checkable
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import EncodedPrompt, Role, Span, not_unicode
from cacheslide_agents.errors import BackendError, RequestError, install_hint
from cacheslide_agents.sampling import Grammar as Grammar
from cacheslide_agents.sampling import Sampling as Sampling
from cacheslide_agents.sampling import TokenLogprob as TokenLogprob

Outcome = Literal["cold", "hit", "partial", "declined", "fallback"]
ChunkState = Literal["hit", "aligned", "update", "vanished"]
FinishReason = Literal["stop", "length", "cancelled"]


class PolicyLike(Protocol):
    """All a backend's caller needs to know of a policy; see `cacheslide_agents.policies`."""

    @property
    def name(self) -> str: ...


class RequestFields(TypedDict, total=False):
    """What a `GenerationRequest` says besides its prompt and the prompt's task."""

    namespace: str
    session: str | None
    sampling: Sampling
    grammar: Grammar | None
    policy: PolicyLike | None
    retain: bool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to answer.

    `spans` partition `prompt_ids`. `namespace` isolates tenants; `task` names the kind of prompt;
    `session` hints at one agent's run. `policy=None` takes the backend's default. With
    `retain=False` the prompt does not become a cached context.
    """

    prompt_ids: Sequence[int]
    spans: Sequence[Span] = ()
    namespace: str = "default"
    task: str = "default"
    session: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    grammar: Grammar | None = None
    policy: PolicyLike | None = None
    retain: bool = True
    request_id: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def of(cls, prompt: EncodedPrompt, **rest: Unpack[RequestFields]) -> Self:
        """The request to answer `prompt`, a prompt of its own task."""
        return cls(prompt_ids=prompt.ids, spans=prompt.spans, task=prompt.task, **rest)

    def __post_init__(self) -> None:
        """`RequestError` for a name that is no Unicode text: `None` would be a namespace, too."""
        for name in ("namespace", "task", "request_id"):
            expect_name(name, getattr(self, name))
        if self.session is not None:
            expect_name("session", self.session)
        for place, span in enumerate(self.spans):
            expect_name(f"the id of span {place}", span.id)


def expect_name(what: str, value: object) -> None:
    """`RequestError` unless `value` is a string that can be sent in UTF-8."""
    if not isinstance(value, str):
        raise RequestError(f"{what}={value!r} must be a string")
    if wrong := not_unicode(value):
        raise RequestError(f"{what} {wrong}")


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """What happened to one chunk. `shift` is that of its first reused run, `None` without one."""

    id: str
    role: Role
    tokens: int
    outcome: ChunkState
    shift: int | None
    reused: int
    corrected: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What happened to one request. Times in seconds; token counts at the last layer.

    `load_s` may overlap with `compute_s`; `wait_s` is the time that computing stood still for it.

    `compute_fraction` = active tokens summed over layers / (prompt tokens x layers).
    `ccpe`: computed tokens that stand at their task's usual positions (CCPE) instead of their own.
    `peak_kv_bytes`: the backend's working slots, as large as its largest request made them, and
    what this request's prefill keeps for the store; not what lies in the store.
    """

    request_id: str
    policy: str
    outcome: Outcome
    reason: str
    prompt_tokens: int
    reused_tokens: int
    active_tokens: int
    compute_fraction: float
    exact: bool
    ttft_s: float = 0.0
    plan_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    queue_s: float = 0.0
    peak_kv_bytes: int = 0
    ccpe: int = 0
    chunks: tuple[ChunkOutcome, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, so that a receipt survives any log, trace or checkpoint."""
        chunks = [{**_fields(chunk), "role": chunk.role.value} for chunk in self.chunks]
        return {**_fields(self), "chunks": chunks}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The receipt that `to_dict` gave; what was noted beside it is left out."""
        chunks = tuple(
            ChunkOutcome(**{**chunk, "role": Role(chunk["role"])}) for chunk in values["chunks"]
        )
        own = {part.name: values[part.name] for part in fields(cls) if part.name in values}
        return cls(**{**own, "chunks": chunks})


def _fields(record: ChunkOutcome | Receipt) -> dict[str, Any]:
    """Not `asdict`, whose deep copies would cost a chat model a fifth of its overhead."""
    return {name: getattr(record, name) for name in record.__slots__}


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """Text and tokens since the previous chunk of answer `index` (0 to n - 1).

    The last chunk of every answer has `finish_reason` and `receipt`. `logprobs` holds one entry per
    token where the request asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities [continuation tokens, vocabulary] (natural log, float32).

    Row i is the distribution before the i-th continuation token.
    """

    logprobs: npt.NDArray[np.float32]
    receipt: Receipt


@runtime_checkable
class Backend(Protocol):
    """A model that answers token prompts and remembers their keys and values.

    Closing what `generate` or `agenerate` returns stops its request.
    """

    @property
    def tokenizer(self) -> Any: ...
    @property
    def model_id(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...

    def generate(self, request: GenerationRequest) -> Generator[GenerationChunk, None, None]: ...
    def agenerate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]: ...
    def score(self, request: GenerationRequest, continuation_ids: Sequence[int]) -> Scores: ...

    def warm(self, request: GenerationRequest) -> None: ...
    def pin(self, session: str, namespace: str = "default") -> None: ...
    def release(self, session: str, namespace: str = "default") -> None: ...
    def refresh(self, session: str, namespace: str = "default") -> None: ...
    def metrics(self) -> Mapping[str, float]: ...
    def close(self) -> None: ...


def load_backend(name: str, **options: Any) -> Backend:
    """The backend registered as `name` (entry point group `cacheslide_agents.backends`).

    Raises `BackendError` when there is none, a package is missing, or it takes no such option.
    """
    found = {entry.name: entry for entry in entry_points(group="cacheslide_agents.backends")}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise BackendError(f"no backend named {name!r} is installed; known: {known}")
    try:
        factory = found[name].load()
    except ImportError as error:
        raise BackendError(
            f"backend {name!r} needs a package that is not installed ({error}); "
            f"{install_hint(name)}"
        ) from error
    try:
        signature(factory).bind(**options)
    except TypeError as error:
        raise BackendError(f"backend {name!r} cannot be made with these options: {error}") from None
    return cast(Backend, factory(**options))
