"""One call to a server that speaks OpenAI's API.

In: a server, a question. Out: LangChain's chunks as the answer comes, or all of its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.outputs import ChatGenerationChunk, ChatResult

from cacheslide_agents.errors import CacheSlideError, RequestTimeoutError
from langchain_cacheslide.deadline import awhole, awithin
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote_answer import expect_answers, result_of, usage_of
from langchain_cacheslide.remote_errors import ServerConnectionError, failure
from langchain_cacheslide.remote_exchange import Cut, Exchange, plain, prepared
from langchain_cacheslide.remote_question import Patience
from langchain_cacheslide.remote_receipt import NO_RECEIPT, receipt_in, receipt_without
from langchain_cacheslide.remote_server import Server


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """May be asked several times. `cut` finds the chunks of its messages."""

    server: Server
    cut: Cut
    question: Question

    def stream(self) -> Generator[ChatGenerationChunk, None, None]:
        """The answer as it comes; closing the generator closes the connection, at any time."""
        exchange = self._prepared(stream=True)
        with self._failures(exchange):
            with closing(self.server.loop.items(lambda: self._events(exchange))) as events:
                for event in events:
                    if (chunk := exchange.add(event)) is not None:
                        yield chunk
            yield self._end(exchange)

    async def astream(self) -> AsyncGenerator[ChatGenerationChunk, None]:
        """As `stream`; cancelling the task closes the connection, too."""
        # Asking for the model and cutting a long prompt would hold up the event loop.
        exchange = await asyncio.to_thread(self._prepared, stream=True)
        with self._failures(exchange):
            async with aclosing(self._events(exchange)) as events:
                async for event in events:
                    if (chunk := exchange.add(event)) is not None:
                        yield chunk
            yield await asyncio.to_thread(self._end, exchange)

    def generate(self) -> ChatResult:
        """The whole answer, or all `n` of them."""
        exchange = self._prepared(stream=False)
        with self._failures(exchange):
            answer = self.server.loop.result(lambda: self._answer(exchange))
            return self._result(exchange, answer)

    async def agenerate(self) -> ChatResult:
        """As `generate`; cancelling the task closes the connection."""
        exchange = await asyncio.to_thread(self._prepared, stream=False)
        with self._failures(exchange):
            answer = await self._answer(exchange)
            return await asyncio.to_thread(self._result, exchange, answer)

    def _prepared(self, *, stream: bool) -> Exchange:
        facts = self.server.facts(Patience.of(self.question.settings))
        return prepared(facts, self.cut, self.question, stream=stream)

    def _events(self, exchange: Exchange) -> AsyncGenerator[Any, None]:
        """What the server sends, until `timeout`; cancelling or closing it ends the connection."""
        create = self.server.client(exchange.patience).chat.completions.create

        async def read() -> AsyncGenerator[Any, None]:
            events = await create(**exchange.arguments)
            async with cast(Any, events):
                async for event in events:
                    yield event

        return awithin(read, exchange.patience.timeout)

    async def _answer(self, exchange: Exchange) -> dict[str, Any]:
        create = self.server.client(exchange.patience).chat.completions.create
        return plain(await awhole(lambda: create(**exchange.arguments), exchange.patience.timeout))

    def _end(self, exchange: Exchange) -> ChatGenerationChunk:
        answer = exchange.answer
        if answer.finish_reason is None:
            raise ServerConnectionError(
                f"the server at {self.server.url} ended the stream without a finish reason after "
                f"{answer.pieces} pieces ({len(answer.text)} characters); the text is in the "
                "error's `partial`",
                partial=answer.text,
                pieces=answer.pieces,
            )
        receipt, own = self._receipt(exchange, answer.facts)
        usage = usage_of(answer.facts.get("usage"), receipt if own else None)
        return answer.end(receipt, usage)

    def _result(self, exchange: Exchange, answer: dict[str, Any]) -> ChatResult:
        expect_answers(answer)
        receipt, own = self._receipt(exchange, answer)
        return result_of(answer, receipt, usage_of(answer.get("usage"), receipt if own else None))

    def _receipt(
        self, exchange: Exchange, answer: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """The receipt, and whether it is the server's own."""
        if not exchange.reason:
            answer_id = str(answer.get("id"))
            found = receipt_in(answer) or self.server.receipt(answer_id, exchange.patience)
            if found is not None:
                return found, True
        reason = exchange.reason or NO_RECEIPT
        exact = bool(exchange.reason)
        return receipt_without(reason, answer, exact=exact, ttft_s=exchange.ttft_s), False

    @contextmanager
    def _failures(self, exchange: Exchange) -> Iterator[None]:
        """Whatever comes out of the client in here leaves as a `ServerError`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CacheSlideError) and not isinstance(error, RequestTimeoutError):
                raise
            ours = failure(
                error,
                url=self.server.url,
                secret=self.server.api_key,
                knobs=exchange.knobs,
                partial=exchange.answer.text,
                pieces=exchange.answer.pieces,
            )
            # The client's own error holds the request with its key, and the server's words as is.
            raise ours from None
