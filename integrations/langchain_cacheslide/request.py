"""One call, ready for a backend.

In: messages, settings and a loaded backend. Out: the `GenerationRequest`, and how to read what it
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage

from cacheslide_agents.backend import Backend, GenerationRequest
from cacheslide_agents.chunks import EncodedPrompt
from langchain_cacheslide import parameters
from langchain_cacheslide.binding import demand
from langchain_cacheslide.loader import BackendLoader
from langchain_cacheslide.messages import read_messages
from langchain_cacheslide.reasoning import OPEN
from langchain_cacheslide.results import AnswerSetup


@dataclass(frozen=True, slots=True)
class Prepared:
    """`timeout`: seconds for the whole answer."""

    backend: Backend
    request: GenerationRequest
    setup: AnswerSetup
    timeout: float | None


def prepare(
    backend_of: Callable[[str | None], Backend],
    loader: BackendLoader,
    messages: Sequence[BaseMessage],
    settings: Mapping[str, Any],
) -> Prepared:
    """`backend_of` gives the backend of a model; it is asked once the settings are found sound.

    Raises `RequestError` or `PromptError` for what cannot be asked.
    """
    sampling, policy = parameters.sampling(settings), parameters.policy(settings)
    wanted = demand(settings)
    reading = read_messages(messages, settings["task"], loader.plans, settings["namespace"])
    backend = backend_of(settings["model"])
    encoder = loader.encoder(backend.tokenizer)
    encoded = encoder.encode(reading.prompt, tools=wanted.tools)
    request = GenerationRequest.of(
        encoded,
        namespace=settings["namespace"],
        session=settings["session"],
        sampling=sampling,
        grammar=wanted.grammar(encoder.call_format),
        policy=policy,
        retain=policy is None or policy.name != parameters.DENSE,
    )
    setup = AnswerSetup(
        backend.model_id,
        request.retain,
        backend.tokenizer.decode,
        calls=encoder.call_format if wanted.reads_calls else None,
        tools=frozenset(wanted.names),
        thinking=_ends_in_thought(encoded) and not wanted.is_forced,
        plan=reading.plan,
    )
    return Prepared(backend, request, setup, settings["timeout"])


def _ends_in_thought(encoded: EncodedPrompt) -> bool:
    return encoded.text.endswith((OPEN, f"{OPEN}\n"))
