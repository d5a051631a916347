"""Sampling, tools and formats of `ChatCacheSlide` on a live server: what vLLM makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import ModuleType
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from pydantic import BaseModel

from langchain_cacheslide import ChatCacheSlide

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]

DRAWN = {"temperature": 2.0, "seed": 5, "max_tokens": 400}
"""A greedy model of random weights may never end its white space between JSON's tokens."""
QUESTION = "Which of the two rivers is the longer one?"


class River(StrEnum):
    RHINE = "Rhine"
    RHONE = "Rhone"


class Answer(BaseModel):
    """An answer with an end, which a model of random weights would not find."""

    river: River
    sure: bool


@pytest.fixture(scope="module")
def url(
    support: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    engines, servers = support("vllm_engines"), support("vllm_servers")
    if engines.MISSING:
        pytest.skip(engines.MISSING)
    folder = tmp_path_factory.mktemp("options")
    model = servers.chat_model(engines.tiny_model(), folder / "model")
    flags = ("--store-gib=0.25", "--enable-auto-tool-choice", "--tool-call-parser=hermes")
    with servers.serving(servers.OURS, model, folder / "log", *flags) as server:
        server.await_health()
        yield server.url


@pytest.fixture
def chat(url: str) -> Callable[..., ChatCacheSlide]:
    return lambda **given: ChatCacheSlide(
        **{"base_url": url, "temperature": 0.0, "max_tokens": 12, **given}
    )


Chats = Callable[..., ChatCacheSlide]


def spoken(message: AIMessage) -> list[str]:
    """The answer's tokens, of a call with `logprobs`."""
    return [each["token"] for each in message.response_metadata["logprobs"]["content"]]


@pytest.mark.parametrize("only_the_best", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=str)
def test_what_leaves_the_likeliest_token_only_is_greedy(
    chat: Chats, only_the_best: dict[str, Any]
) -> None:
    greedy = chat().invoke(QUESTION).content
    assert chat(temperature=2.0).invoke(QUESTION).content != greedy
    assert chat(temperature=2.0, **only_the_best).invoke(QUESTION).content == greedy


def test_a_seed_is_the_same_answer_again(chat: Chats) -> None:
    drawn = chat(temperature=2.0, seed=7)
    once = drawn.invoke(QUESTION).content
    assert drawn.invoke(QUESTION).content == once
    assert chat(temperature=2.0, seed=8).invoke(QUESTION).content != once


def test_a_penalty_lets_no_token_come_twice(chat: Chats) -> None:
    message = chat(repetition_penalty=100.0, logprobs=True).invoke(QUESTION)
    tokens = [token for token in spoken(message) if token]  # "": a part of a character
    assert len(set(tokens)) == len(tokens) > 5


def test_logprobs_come_with_their_alternatives(chat: Chats) -> None:
    message = chat(logprobs=True, top_logprobs=3).invoke(QUESTION)
    assert len(spoken(message)) == 12
    for each in message.response_metadata["logprobs"]["content"]:
        told = [other["logprob"] for other in each["top_logprobs"]]
        assert len(told) == 3
        assert told == sorted(told, reverse=True)
        assert each["logprob"] == told[0]  # greedy


def test_max_tokens_and_stop_end_an_answer(chat: Chats) -> None:
    whole = chat(logprobs=True).invoke(QUESTION)
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    end = next(token for token in spoken(whole)[3:] if token)
    cut = chat(stop=[end]).invoke(QUESTION)
    assert cut.content == str(whole.content).partition(end)[0]
    assert cut.response_metadata["finish_reason"] == "stop"


def test_n_answers_share_one_prompt(chat: Chats) -> None:
    asked = chat(temperature=2.0, seed=3, n=3)
    (answers,) = asked.generate([[HumanMessage(QUESTION)]]).generations
    assert len({each.text for each in answers}) == 3
    read, written, _ = counted(asked.invoke(QUESTION))
    assert (read, written) == (counted(chat().invoke(QUESTION))[0], 36)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_is_an_instance(chat: Chats, method: str) -> None:
    found = chat(**DRAWN).with_structured_output(Answer, method=method).invoke(QUESTION)
    assert isinstance(found, Answer)


@pytest.mark.parametrize(("choice", "finish"), [("any", "tool_calls"), ("Answer", "stop")])
def test_a_call_that_is_asked_for_is_made(chat: Chats, choice: str, finish: str) -> None:
    model = chat(**DRAWN).bind_tools([Answer], tool_choice=choice)
    whole = model.invoke(QUESTION)
    (call,) = whole.tool_calls
    assert call["name"] == "Answer"
    assert Answer.model_validate(call["args"])
    assert whole.response_metadata["finish_reason"] == finish  # vLLM's word for it, as OpenAI's
    first, *others = model.stream(QUESTION)
    streamed = sum(others, start=first)
    assert isinstance(streamed, AIMessageChunk)
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]


def test_a_turn_after_a_tools_result_can_end(chat: Chats) -> None:
    call = {"name": "Answer", "args": {"river": "Rhine", "sure": True}, "id": "call-1"}
    dialogue = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("The Rhine.", tool_call_id="call-1"),
    ]
    said = chat().bind_tools([Answer], tool_choice="none").invoke(dialogue)
    assert said.content
    assert said.tool_calls == []


def test_streams_and_asynchronous_calls_say_the_same(chat: Chats) -> None:
    model = chat()
    whole = model.invoke(QUESTION)

    async def asked() -> tuple[AIMessage, str, list[AIMessage]]:
        pieces = [str(piece.content) async for piece in model.astream(QUESTION)]
        return await model.ainvoke(QUESTION), "".join(pieces), await model.abatch([QUESTION] * 4)

    alone, streamed, batch = asyncio.run(asked())
    assert {alone.content, streamed, *(each.content for each in batch)} == {whole.content}
    first, *others = model.stream(QUESTION)
    total = sum(others, start=first)
    assert total.content == whole.content
    assert counted(total) == counted(whole)


def counted(message: AIMessage) -> tuple[int, int, int]:
    usage = message.usage_metadata
    assert usage is not None
    return usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]
