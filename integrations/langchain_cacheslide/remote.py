"""Answers from any server that speaks OpenAI's chat completions: vLLM, SGLang, llama.cpp, ...

In: LangChain messages and settings. Out: LangChain's chunks and results. Chunk plans go only to a
server whose `/cacheslide/status` asks for them; every other server sees plain requests, and the
receipt says that reuse is off.

The HTTP client honours the environment's proxies (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`), so
list a local server in `NO_PROXY`, and `OPENAI_CUSTOM_HEADERS`; OpenAI's own keys, organisation and
project are never sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import Any, cast

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import SecretStr

from cacheslide_agents.errors import CacheSlideError, RequestTimeoutError
from langchain_cacheslide.deadline import awhole, awithin
from langchain_cacheslide.remote_answer import expect_answers, result_of, usage_of
from langchain_cacheslide.remote_call import Call, Cut, cut_by_characters, plain, prepared
from langchain_cacheslide.remote_errors import ServerConnectionError, failure
from langchain_cacheslide.remote_question import Patience
from langchain_cacheslide.remote_receipt import NO_RECEIPT, receipt_in, receipt_without
from langchain_cacheslide.remote_server import Server


class RemoteChat:
    """A server's model behind LangChain's words. Safe to call from threads and event loops.

    `model=None` takes the only model the server has. `cut` finds the chunks for a plan; one that
    encodes with the server's own tokenizer binds plans to token ids.

    Settings: `temperature`, `max_tokens`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`,
    `stop`, `logprobs`, `top_logprobs`, `n` (1 for a stream), `parallel_tool_calls`, `strict`,
    `namespace`, `task`, `session`, `reuse`, `policy`. One that is absent or `None` is left to the
    server, and so are `top_k`, `min_p` and `repetition_penalty` at their off values. Beside them
    `timeout`: seconds for the whole answer, retries included (`None`: as many as it takes, unless a
    server is silent for ten minutes); the server's models, asked for once, have as many (60 for
    `None`), its status and a receipt 5 at most. And `max_retries` (2): refused and broken
    connections, 408, 409, 429 and 5xx are tried again as often, not once an answer has begun.
    `tools`, `tool_choice` and `response_format` are in OpenAI's form. Every failure is a
    `CacheSlideError`, mostly a `ServerError`, whose `partial` keeps the text of an answer that
    broke off.
    """

    def __init__(
        self,
        base_url: str,
        api_key: SecretStr | None = None,
        model: str | None = None,
        *,
        cut: Cut = cut_by_characters,
    ) -> None:
        self._server = Server(base_url, api_key, model)
        self._cut = cut

    def __repr__(self) -> str:
        return f"RemoteChat({self._server.url!r})"

    @property
    def model(self) -> str:
        """The model's name; asks the server if none was given."""
        return self._server.facts(Patience()).model

    def stream(
        self,
        messages: Sequence[BaseMessage],
        settings: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> Iterator[ChatGenerationChunk]:
        """The answer as it comes; closing the generator closes the connection, at any time."""
        call = self._call(messages, settings, tools, tool_choice, response_format, stream=True)
        with self._failures(call):
            with closing(self._server.loop.items(lambda: self._events(call))) as events:
                for event in events:
                    if (chunk := call.add(event)) is not None:
                        yield chunk
            yield self._end(call)

    async def astream(
        self,
        messages: Sequence[BaseMessage],
        settings: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[ChatGenerationChunk]:
        """As `stream`; cancelling the task closes the connection, too."""
        given = (messages, settings, tools, tool_choice, response_format)
        # Asking for the model and cutting a long prompt would hold up the event loop.
        call = await asyncio.to_thread(self._call, *given, stream=True)
        with self._failures(call):
            async with aclosing(self._events(call)) as events:
                async for event in events:
                    if (chunk := call.add(event)) is not None:
                        yield chunk
            yield await asyncio.to_thread(self._end, call)

    def generate(
        self,
        messages: Sequence[BaseMessage],
        settings: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> ChatResult:
        """The whole answer, or all `n` of them."""
        call = self._call(messages, settings, tools, tool_choice, response_format, stream=False)
        with self._failures(call):
            answer = self._server.loop.result(lambda: self._answer(call))
            return self._result(call, answer)

    async def agenerate(
        self,
        messages: Sequence[BaseMessage],
        settings: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> ChatResult:
        """As `generate`; cancelling the task closes the connection."""
        given = (messages, settings, tools, tool_choice, response_format)
        call = await asyncio.to_thread(self._call, *given, stream=False)
        with self._failures(call):
            answer = await self._answer(call)
            return await asyncio.to_thread(self._result, call, answer)

    def _call(
        self,
        messages: Sequence[BaseMessage],
        settings: Mapping[str, Any],
        *wanted: Any,
        stream: bool,
    ) -> Call:
        facts = self._server.facts(Patience.of(settings))
        return prepared(facts, self._cut, messages, settings, *wanted, stream=stream)

    def _events(self, call: Call) -> AsyncGenerator[Any, None]:
        """What the server sends, until `timeout`; cancelling or closing it ends the connection."""
        create = self._server.client(call.patience).chat.completions.create

        async def read() -> AsyncIterator[Any]:
            events = await create(**call.arguments)
            async with cast(Any, events):
                async for event in events:
                    yield event

        return awithin(read, call.patience.timeout)

    async def _answer(self, call: Call) -> dict[str, Any]:
        create = self._server.client(call.patience).chat.completions.create
        return plain(await awhole(lambda: create(**call.arguments), call.patience.timeout))

    def _end(self, call: Call) -> ChatGenerationChunk:
        answer = call.answer
        if answer.finish_reason is None:
            raise ServerConnectionError(
                f"the server at {self._server.url} ended the stream without a finish reason after "
                f"{answer.pieces} pieces ({len(answer.text)} characters); the text is in the "
                "error's `partial`",
                partial=answer.text,
                pieces=answer.pieces,
            )
        receipt, own = self._receipt(call, answer.facts)
        usage = usage_of(answer.facts.get("usage"), receipt if own else None)
        return answer.end(receipt, usage)

    def _result(self, call: Call, answer: dict[str, Any]) -> ChatResult:
        expect_answers(answer)
        receipt, own = self._receipt(call, answer)
        return result_of(answer, receipt, usage_of(answer.get("usage"), receipt if own else None))

    def _receipt(self, call: Call, answer: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The receipt, and whether it is the server's own."""
        if not call.reason:
            answer_id = str(answer.get("id"))
            found = receipt_in(answer) or self._server.receipt(answer_id, call.patience)
            if found is not None:
                return found, True
        reason = call.reason or NO_RECEIPT
        exact = bool(call.reason)
        return receipt_without(reason, answer, exact=exact, ttft_s=call.ttft_s), False

    @contextmanager
    def _failures(self, call: Call) -> Iterator[None]:
        """Whatever comes out of the client in here leaves as a `ServerError`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CacheSlideError) and not isinstance(error, RequestTimeoutError):
                raise
            ours = failure(
                error,
                url=self._server.url,
                secret=self._server.api_key,
                knobs=call.knobs,
                partial=call.answer.text,
                pieces=call.answer.pieces,
            )
            # The client's own error holds the request with its key, and the server's words as is.
            raise ours from None
