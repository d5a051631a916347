"""What one call asks of a server.

In: LangChain messages, and a chat model's settings. Out: a `Question`: what of them a server that
speaks OpenAI's API can be asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.messages import BaseMessage

from cacheslide_agents.errors import RequestError
from langchain_cacheslide import parameters
from langchain_cacheslide.binding import demand

_LOCAL = {"num_beams": 1, "length_penalty": 1.0}
"""What OpenAI's API has no word for, with the value that changes nothing."""
_SENT = frozenset(
    (
        *parameters.SAMPLING,
        *parameters.LOGPROBS,
        *parameters.ROUTING,
        *parameters.PATIENCE,
        "strict",
    )
).difference(_LOCAL)


@dataclass(frozen=True, slots=True)
class Question:
    """`settings` as `RemoteChat` lists them; the rest in OpenAI's form."""

    messages: Sequence[BaseMessage]
    settings: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, messages: Sequence[BaseMessage], settings: Mapping[str, Any]) -> Self:
        """That of a chat model's call. `RequestError` for what no server can be asked."""
        wanted = demand(settings)
        for name, plain in _LOCAL.items():
            if settings[name] != plain:
                raise RequestError(f"{name}={settings[name]!r} cannot be asked of a server")
        if settings["grammar"] is not None:
            raise RequestError("grammar= cannot be asked of a server; use response_format")
        sent: dict[str, Any] = {name: settings[name] for name in _SENT}
        if wanted.reads_calls:
            sent["parallel_tool_calls"] = wanted.parallel
        choice = wanted.openai_choice if wanted.tools else None
        return cls(messages, sent, wanted.tools, choice, wanted.response_format)
