"""The LangChain chat model.

In: LangChain messages or a `ChunkedPrompt`. Out: LangChain answers, streamed or whole, whose
metadata say what was reused: `response_metadata["cacheslide"]` is the receipt of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableSerializable
from langchain_core.tools import BaseTool
from pydantic import model_validator

from cacheslide_agents.backend import Backend
from cacheslide_agents.chunks import ChunkedPrompt
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.template import PromptTemplate
from langchain_cacheslide import counting, parameters, structured
from langchain_cacheslide.binding import ToolLike, demand, openai_tools
from langchain_cacheslide.fields import ChatFields
from langchain_cacheslide.local import LocalCall
from langchain_cacheslide.messages import to_messages, to_prompt_value
from langchain_cacheslide.profile import profile_of
from langchain_cacheslide.question import Question
from langchain_cacheslide.request import prepare
from langchain_cacheslide.results import PROVIDER
from langchain_cacheslide.template import TemplateRunnable

if TYPE_CHECKING:
    from langchain_cacheslide.remote_call import RemoteCall


class ChatCacheSlide(ChatFields):
    """A self-hosted chat model that reuses the KV cache of prompt chunks that moved.

    Input is what every LangChain chat model takes, cut into chunks automatically, or a
    `ChunkedPrompt`; `template | model` works. `backend` computes in this process; `base_url` asks
    a server that speaks OpenAI's API instead. All settings but `backend`, `backend_options`,
    `base_url`, `api_key` and `loader` may also be given per call or with `bind`, and besides them
    `tools`, `tool_choice`, `parallel_tool_calls`, `response_format` and `grammar`. Raises
    `RequestError` for arguments it does not know; none is silently ignored.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._settle_place()
        parameters.sampling(self._settings())
        return self

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on, and the namespace: LangChain's own cache keys on these."""
        told = {"backend_options": self.backend_options, **self._settings()}
        if self.is_remote:
            return {"base_url": self.base_url, **told}
        if isinstance(self.backend, str):
            return {"backend": self.backend, **told}
        # Two models may have one name: two folders of the same name, one folder in two precisions.
        weights = getattr(self.backend, "fingerprint", None) or id(self.backend)
        about = {"backend": type(self.backend).__name__, "weights": weights}
        return {**about, **told, "model": self.backend.model_id}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        name = kwargs.get("model") or self._identifying_params["model"]
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = name or "default"
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        return profile_of(self.backend)

    def load(self) -> Backend:
        """The backend, loaded now if it was not; calls do this by themselves."""
        return self._backend(self.model)

    def _backend(self, model: str | None) -> Backend:
        if self.is_remote:
            raise RequestError(f"the model at {self.base_url} is not loaded in this process")
        if isinstance(self.backend, str):
            return self.loader.get(self.backend, model, self.backend_options)
        backend: Backend = self.backend
        return backend

    def _call(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        given: Mapping[str, Any],
        *,
        streamed: bool = False,
    ) -> LocalCall | RemoteCall:
        """One call, checked and ready; loads the backend if need be."""
        settings = parameters.merge(self._settings(), stop, given)
        if streamed:
            parameters.check_streamable(settings)
        if self.is_remote:
            parameters.sampling(settings)
            server = self.loader.server(self.base_url or "", self.api_key, settings["model"])
            return server.call(Question.of(messages, settings))
        if not isinstance(self.backend, str) and "model" in given:
            self._check_model_of(self.backend, settings["model"])
        return LocalCall(prepare(self._backend, self.loader, messages, settings))

    def _should_stream(self, **kwargs: Any) -> bool:
        """LangChain also streams where only a callback listens, and its streams have no place for
        several answers."""
        if kwargs.get("n", self.n) != 1 and not kwargs.get("stream"):
            return False
        return super()._should_stream(**kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._call(messages, stop, kwargs).generate()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Loading and tokenising take long enough to hold up an event loop.
        call = await asyncio.to_thread(self._call, messages, stop, kwargs)
        return await call.agenerate()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._call(messages, stop, kwargs, streamed=True).stream()) as pieces:
            yield from pieces

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await asyncio.to_thread(self._call, messages, stop, kwargs, streamed=True)
        async with aclosing(call.astream()) as pieces:
            async for piece in pieces:
                yield piece

    def _convert_input(self, model_input: LanguageModelInput | ChunkedPrompt) -> PromptValue:
        if isinstance(model_input, ChunkedPrompt):
            return to_prompt_value(model_input)
        return super()._convert_input(model_input)

    def __ror__(self, other: Any) -> RunnableSerializable[Any, Any]:
        if isinstance(other, PromptTemplate):
            return TemplateRunnable(template=other) | self
        return super().__ror__(other)

    def to_messages(
        self, prompt: ChunkedPrompt, *, namespace: str | None = None
    ) -> list[BaseMessage]:
        """`prompt` as messages whose chunks this model knows again, whatever becomes of their
        annotations: for agents and middleware that rebuild messages. `namespace`: that of the
        calls to come, if it is not the model's own."""
        self.loader.plans.remember(prompt, self.namespace if namespace is None else namespace)
        return to_messages(prompt)

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of `text`, without any that a chat template would add."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.load().tokenizer.encode(text, add_special_tokens=False))

    def get_num_tokens(self, text: str) -> int:
        if self.is_remote and self.custom_get_token_ids is None:
            return counting.estimated(text)
        return super().get_num_tokens(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the whole prompt as it would be sent, chat template and tools included; an
        estimate where a server has the tokenizer."""
        if self.is_remote:
            return counting.estimated_prompt(messages, tools)
        return counting.counted_prompt(self.load(), self.loader, messages, tools)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with `tools`. `tool_choice`: "auto" (calls or text), "none", "any" or
        "required" (a call), or the name of the one to call. `parallel_tool_calls=None`: several
        calls under "auto", one where a call is forced. Calls match their schema, with or without
        `strict`, here and on `cacheslide serve`; other servers are told `strict` and do as they
        do. Raises `RequestError` for tools that cannot be described."""
        given: dict[str, Any] = {"tools": openai_tools(tools), "tool_choice": tool_choice}
        given |= {"parallel_tool_calls": parallel_tool_calls, "strict": strict}
        demand({**dict.fromkeys(parameters.ANSWER), **given})
        kept = {name: value for name, value in given.items() if value not in (None, [])}
        return self.bind(**kept, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: Sequence[ToolLike] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers as instances of `schema`: a pydantic class, a TypedDict or a JSON schema.

        `method`: "json_schema", "json_mode" (the same, but works without a schema, too) or
        "function_calling". The answer matches, with or without `strict` (of servers see
        `bind_tools`), unless it is cut off: `OutputParserException` then says so. With `tools` the
        model may call them instead; such an answer stays a message.
        """
        structured.check_method(method, schema, tools)
        binding = structured.binding(method, schema, strict)
        if tools is not None:
            binding["tools"] = openai_tools(tools)
        model = self.bind(**binding, **kwargs)
        parser = structured.parser(method, schema, with_tools=bool(tools))
        return structured.with_raw(model, parser) if include_raw else model | parser
