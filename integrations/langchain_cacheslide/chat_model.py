"""The LangChain chat model.

In: LangChain messages or a `ChunkedPrompt`. Out: LangChain answers, streamed or whole, whose
metadata say what was reused: `response_metadata["cacheslide"]` is the receipt of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, NoReturn, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import (
    BaseChatModel,
    agenerate_from_stream,
    generate_from_stream,
)
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableSerializable
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, model_validator

from cacheslide_agents.backend import Backend, GenerationChunk, GenerationRequest
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.template import PromptTemplate
from langchain_cacheslide import parameters
from langchain_cacheslide.loader import BackendLoader
from langchain_cacheslide.messages import from_messages, to_prompt_value
from langchain_cacheslide.results import Answer
from langchain_cacheslide.template import TemplateRunnable


class ChatCacheSlide(BaseChatModel):
    """A self-hosted chat model that reuses the KV cache of prompt chunks that moved.

    Input is what every LangChain chat model takes, cut into chunks automatically, or a
    `ChunkedPrompt`; `template | model` works. All settings but `model`, `backend`,
    `backend_options` and `loader` may also be given per call or with `bind`. Raises
    `RequestError` for arguments it does not know and for tools, structured output and
    log-probabilities, which it does not support.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str | None = None
    """Alias, local directory or hub id; `None` takes the backend's default."""
    backend: Any = "torch"
    """The name of an installed backend, or a `Backend` (which then says what the model is)."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the backend's constructor: `device`, `dtype`, budgets."""
    loader: BackendLoader = Field(default_factory=BackendLoader, exclude=True, repr=False)
    """Give several models one loader and they share weights and cached contexts."""

    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        parameters.sampling(self._settings())
        if not isinstance(self.backend, str):
            if not isinstance(self.backend, Backend):
                raise RequestError(
                    f"backend={self.backend!r} must be a backend's name or a Backend instance"
                )
            if self.model not in (None, self.backend.model_id):
                raise RequestError(
                    f"model={self.model!r} does not name the model of the given backend, "
                    f"{self.backend.model_id!r}; leave `model` out"
                )
        return self

    @property
    def _llm_type(self) -> str:
        return "cacheslide"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on, and the namespace: LangChain's own cache keys on these."""
        named = isinstance(self.backend, str)
        return {
            "model": self.model if named else self.backend.model_id,
            "backend": self.backend if named else type(self.backend).__name__,
            "backend_options": self.backend_options,
            **self._settings(),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "cacheslide"
        name = kwargs.get("model", self._identifying_params["model"])
        if name is not None:
            params["ls_model_name"] = name
        return params

    def load(self) -> Backend:
        """The backend, loaded now if it was not; calls do this by themselves."""
        if isinstance(self.backend, str):
            return self.loader.get(self.backend, self.model, self.backend_options)
        backend: Backend = self.backend
        return backend

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        backend, request = self._prepare(messages, stop, kwargs)
        answer = Answer(backend.model_id, request.retain)
        stream = cast("Generator[GenerationChunk, None, None]", backend.generate(request))
        with closing(stream) as chunks:
            for chunk in chunks:
                if (piece := answer.add(chunk)) is not None:
                    yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        # Loading and tokenising take long enough to hold up an event loop.
        backend, request = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
        answer = Answer(backend.model_id, request.retain)
        stream = cast("AsyncGenerator[GenerationChunk, None]", backend.agenerate(request))
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if (piece := answer.add(chunk)) is not None:
                    yield piece

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in parameters.SETTINGS}

    def _prepare(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> tuple[Backend, GenerationRequest]:
        settings = parameters.merge(self._settings(), stop, given)
        sampling, policy = parameters.sampling(settings), parameters.policy(settings)
        prompt = from_messages(messages, settings["task"])
        backend = self.load()
        encoded = self.loader.encoder(backend.tokenizer).encode(prompt)
        return backend, GenerationRequest(
            prompt_ids=encoded.ids,
            spans=encoded.spans,
            namespace=settings["namespace"],
            task=encoded.task,
            session=settings["session"],
            sampling=sampling,
            policy=policy,
            retain=policy is None or policy.name != parameters.DENSE,
        )

    def _convert_input(self, model_input: LanguageModelInput | ChunkedPrompt) -> PromptValue:
        if isinstance(model_input, ChunkedPrompt):
            return to_prompt_value(model_input)
        return super()._convert_input(model_input)

    def __ror__(self, other: Any) -> RunnableSerializable[Any, Any]:
        if isinstance(other, PromptTemplate):
            return TemplateRunnable(template=other) | self
        return super().__ror__(other)

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of `text`, without any that a chat template would add."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.load().tokenizer.encode(text, add_special_tokens=False))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the whole prompt as it would be sent, chat template included."""
        if tools:
            raise parameters.refuse_tools()
        prompt = from_messages(messages, self.task)
        return len(self.loader.encoder(self.load().tokenizer).encode(prompt).ids)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> NoReturn:
        raise parameters.refuse_tools()

    def with_structured_output(self, schema: dict[str, Any] | type, **kwargs: Any) -> NoReturn:
        raise parameters.refuse_structured_output()
