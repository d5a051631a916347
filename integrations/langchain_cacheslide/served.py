"""One call to a server that speaks OpenAI's API.

In: messages and settings. Out: what `RemoteChat` makes of them, with our own metadata.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from cacheslide_agents.errors import RequestError
from langchain_cacheslide import parameters
from langchain_cacheslide.binding import Demand
from langchain_cacheslide.results import PROVIDER

if TYPE_CHECKING:
    from langchain_cacheslide.remote import RemoteChat

_SENT = frozenset(
    (
        *parameters.SAMPLING,
        *parameters.LOGPROBS,
        *parameters.ROUTING,
        *parameters.PATIENCE,
        "strict",
    )
)
_LOCAL = {"num_beams": 1, "length_penalty": 1.0}
"""What OpenAI's API has no word for, with the value that changes nothing."""


@dataclass(frozen=True, slots=True)
class ServedCall:
    server: RemoteChat
    messages: Sequence[BaseMessage]
    settings: Mapping[str, Any]
    demand: Demand

    def __post_init__(self) -> None:
        for name, plain in _LOCAL.items():
            if self.settings[name] != plain:
                raise RequestError(f"{name}={self.settings[name]!r} cannot be asked of a server")
        if self.settings["grammar"] is not None:
            raise RequestError("grammar= cannot be asked of a server; use response_format")

    def stream(self) -> Generator[ChatGenerationChunk, None, None]:
        stream = cast("Generator[ChatGenerationChunk, None, None]", self.server.stream(*self._args))
        with closing(stream) as chunks:
            for chunk in chunks:
                yield _ours(chunk)

    async def astream(self) -> AsyncGenerator[ChatGenerationChunk, None]:
        stream = cast("AsyncGenerator[ChatGenerationChunk, None]", self.server.astream(*self._args))
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield _ours(chunk)

    def generate(self) -> ChatResult:
        return _ours_all(self.server.generate(*self._args))

    async def agenerate(self) -> ChatResult:
        return _ours_all(await self.server.agenerate(*self._args))

    @property
    def _args(self) -> tuple[Any, ...]:
        settings = {name: self.settings[name] for name in _SENT if name not in _LOCAL}
        if self.demand.reads_calls:
            settings["parallel_tool_calls"] = self.demand.parallel
        tools = list(self.demand.tools) or None
        return (
            self.messages,
            settings,
            tools,
            self.demand.openai_choice if tools else None,
            self.demand.response_format,
        )


def _ours(chunk: ChatGenerationChunk) -> ChatGenerationChunk:
    if chunk.message.response_metadata.get("finish_reason") is not None:
        chunk.message.response_metadata["model_provider"] = PROVIDER
    return chunk


def _ours_all(result: ChatResult) -> ChatResult:
    for generation in result.generations:
        generation.message.response_metadata["model_provider"] = PROVIDER
    return result
