"""ChatCacheSlide: streams, asyncio, concurrency, and requests that are given up half-way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk

from cacheslide_agents.backend import GenerationChunk
from cacheslide_agents.errors import ContextOverflowError
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.results import Answer, AnswerSetup

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend

WORDS = "one two three four"


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend(reused=3)
    return fake


@pytest.fixture
def chat(backend: FakeBackend) -> ChatCacheSlide:
    return ChatCacheSlide(backend=backend)


def without_names(answer: AIMessage | AIMessageChunk) -> dict[str, Any]:
    """What an answer says, less the ids that differ from call to call."""
    metadata = dict(answer.response_metadata)
    metadata["cacheslide"] = {**metadata["cacheslide"], "request_id": None}
    return {"text": answer.content, "metadata": metadata, "usage": answer.usage_metadata}


def joined(pieces: list[AIMessageChunk]) -> AIMessageChunk:
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return whole


async def collected(chat: ChatCacheSlide, text: str) -> list[AIMessageChunk]:
    return [piece async for piece in chat.astream(text)]


def test_stream_gives_words_as_they_come_and_adds_up_to_the_whole_answer(
    chat: ChatCacheSlide,
) -> None:
    pieces = list(chat.stream(WORDS))
    assert [piece.content for piece in pieces] == ["one", " two", " three", " four", ""]
    assert without_names(joined(pieces)) == without_names(chat.invoke(WORDS))


def test_async_stream_and_async_answer_equal_the_synchronous_ones(chat: ChatCacheSlide) -> None:
    expected = without_names(chat.invoke(WORDS))
    pieces = asyncio.run(collected(chat, WORDS))
    assert [piece.content for piece in pieces] == ["one", " two", " three", " four", ""]
    assert without_names(joined(pieces)) == expected
    assert without_names(asyncio.run(chat.ainvoke(WORDS))) == expected


def test_only_the_last_piece_of_a_stream_carries_usage_and_receipt(chat: ChatCacheSlide) -> None:
    *pieces, last = chat.stream(WORDS)
    assert [piece.usage_metadata for piece in pieces] == [None] * 4
    assert all(piece.response_metadata == {} for piece in pieces)
    assert last.chunk_position == "last"
    assert last.usage_metadata is not None
    assert last.usage_metadata["output_tokens"] == len(WORDS.encode())
    assert last.usage_metadata["input_token_details"]["cache_read"] == 3
    assert last.response_metadata["cacheslide"]["reused_tokens"] == 3


def test_callbacks_see_every_token_once(chat: ChatCacheSlide) -> None:
    class Listener(BaseCallbackHandler):
        heard: list[Any]

        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.heard.append(token)

    listener = Listener()
    listener.heard = []
    list(chat.stream(WORDS, config={"callbacks": [listener]}))
    assert listener.heard == ["one", " two", " three", " four", ""]


def test_closed_stream_stops_the_backend(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    stream = chat.stream(WORDS)
    next(stream)
    cast("Any", stream).close()
    gc.collect()
    assert (backend.finished, backend.stopped) == (0, 1)


def test_closed_async_stream_stops_the_backend(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    async def leave() -> None:
        stream = chat.astream(WORDS)
        await anext(stream)
        await cast("Any", stream).aclose()

    asyncio.run(leave())
    assert (backend.finished, backend.stopped) == (0, 1)


def test_cancelled_task_stops_the_backend(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    backend.pause_s = 30.0

    async def give_up() -> None:
        task = asyncio.create_task(chat.ainvoke(WORDS))
        while not backend.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (backend.finished, backend.stopped) == (0, 1)

    asyncio.run(give_up())


def test_twenty_concurrent_async_answers_never_mix(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    questions = [f"q{i} " * (i + 1) for i in range(20)]

    async def ask() -> list[AIMessage]:
        return await asyncio.gather(*(chat.ainvoke(question) for question in questions))

    answers = asyncio.run(ask())
    assert [answer.content for answer in answers] == [question.strip() for question in questions]
    sent = {request.request_id: len(request.prompt_ids) for request in backend.requests}
    for answer in answers:
        receipt = answer.response_metadata["cacheslide"]
        assert receipt["prompt_tokens"] == sent.pop(receipt["request_id"])
    assert sent == {}


def test_threads_stream_their_own_answers(chat: ChatCacheSlide) -> None:
    def ask(number: int) -> str:
        return "".join(str(piece.content) for piece in chat.stream(f"a{number} b{number}"))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(32))) == [f"a{i} b{i}" for i in range(32)]


def test_batch_keeps_the_order_of_its_inputs(chat: ChatCacheSlide) -> None:
    questions: list[LanguageModelInput] = [f"question {i}" for i in range(12)]
    assert [answer.content for answer in chat.batch(questions)] == questions


def test_half_a_character_is_counted_but_makes_no_piece() -> None:
    answer = Answer(AnswerSetup("m", retained=True, spell=str))
    assert answer.add(GenerationChunk(0, "", (195,))) is None
    piece = answer.add(GenerationChunk(1, "é", (169,)))
    assert piece is not None
    assert piece.message.content == "é"
    assert answer.output_tokens == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_errors_of_the_backend_reach_the_caller_unchanged(
    chat: ChatCacheSlide,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    def overflow(request: Any) -> Any:
        raise ContextOverflowError(len(request.prompt_ids), 8)

    monkeypatch.setattr(backend, "_pieces", overflow)
    with pytest.raises(ContextOverflowError, match="window is 8"):
        if asynchronous:
            asyncio.run(chat.ainvoke(WORDS))
        else:
            chat.invoke(WORDS)
