"""One call to a backend in this process.

In: a prepared request. Out: LangChain's chunks as the answer comes, or all of its answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass

from langchain_core.outputs import ChatGenerationChunk, ChatResult

from cacheslide_agents.backend import GenerationChunk
from langchain_cacheslide.deadline import awithin, within
from langchain_cacheslide.local_errors import as_langchain
from langchain_cacheslide.request import Prepared
from langchain_cacheslide.results import Answer, Answers


@dataclass(frozen=True, slots=True)
class LocalCall:
    prepared: Prepared

    def stream(self) -> Generator[ChatGenerationChunk, None, None]:
        """Closing the generator stops the request."""
        answer = Answer(self.prepared.setup)
        with closing(self._chunks()) as chunks:
            for chunk in chunks:
                if (piece := answer.add(chunk)) is not None:
                    yield piece

    async def astream(self) -> AsyncGenerator[ChatGenerationChunk, None]:
        answer = Answer(self.prepared.setup)
        async with aclosing(self._achunks()) as chunks:
            async for chunk in chunks:
                if (piece := answer.add(chunk)) is not None:
                    yield piece

    def generate(self) -> ChatResult:
        answers = Answers(self.prepared.setup, self.prepared.request.sampling.n)
        with closing(self._chunks()) as chunks:
            for chunk in chunks:
                answers.add(chunk)
        return answers.result()

    async def agenerate(self) -> ChatResult:
        answers = Answers(self.prepared.setup, self.prepared.request.sampling.n)
        async with aclosing(self._achunks()) as chunks:
            async for chunk in chunks:
                answers.add(chunk)
        return answers.result()

    def _chunks(self) -> Generator[GenerationChunk, None, None]:
        prepared = self.prepared
        stream = within(lambda: prepared.backend.generate(prepared.request), prepared.timeout)
        with as_langchain(), closing(stream) as chunks:
            yield from chunks

    async def _achunks(self) -> AsyncGenerator[GenerationChunk, None]:
        prepared = self.prepared
        stream = awithin(lambda: prepared.backend.agenerate(prepared.request), prepared.timeout)
        with as_langchain():
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    yield chunk
