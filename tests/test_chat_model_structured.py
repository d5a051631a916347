"""ChatCacheSlide: structured output, response formats, reasoning, log-probabilities, n answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration
from langchain_core.tools import tool
from pydantic import BaseModel

from cacheslide_agents.errors import RequestError
from cacheslide_agents.sampling import Grammar
from langchain_cacheslide import ChatCacheSlide

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend


class Joke(BaseModel):
    """A joke."""

    setup: str
    rating: int


class JokeDict(TypedDict):
    """A joke."""

    setup: str
    rating: int


class Tree(BaseModel):
    """A tree."""

    children: list[Tree]


@tool
def look(query: str) -> str:
    """Look it up."""
    return query


TEXT = '{"setup": "A cat", "rating": 3}'
CALL = '<tool_call>\n{"name": "look", "arguments": {"query": "x"}}\n</tool_call>'
JOKE_CALL = f'<tool_call>\n{{"name": "Joke", "arguments": {TEXT}}}\n</tool_call>'


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend(says=[TEXT])
    return fake


@pytest.fixture
def chat(backend: FakeBackend) -> ChatCacheSlide:
    return ChatCacheSlide(backend=backend)


def grammar(backend: FakeBackend) -> Grammar:
    found = backend.requests[-1].grammar
    assert found is not None
    return found


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
@pytest.mark.parametrize("schema", [Joke, JokeDict, Joke.model_json_schema()])
def test_answer_is_an_instance_of_its_schema_and_was_held_to_it(
    chat: ChatCacheSlide, backend: FakeBackend, schema: Any, method: str
) -> None:
    expected: Any = Joke(setup="A cat", rating=3) if schema is Joke else json.loads(TEXT)
    model = chat.with_structured_output(schema, method=method)
    assert model.invoke("Go") == expected
    assert list(model.stream("Go"))[-1] == expected
    assert asyncio.run(model.ainvoke("Go")) == expected
    assert grammar(backend).kind == "json_schema"
    assert set(json.loads(grammar(backend).source)["properties"]) == {"setup", "rating"}


@pytest.mark.parametrize("strict", [None, True, False])
def test_function_calling_takes_one_call_of_the_schema(
    chat: ChatCacheSlide, backend: FakeBackend, strict: bool | None
) -> None:
    backend.says = [JOKE_CALL]
    model = chat.with_structured_output(Joke, method="function_calling", strict=strict)
    assert model.invoke("Go") == Joke(setup="A cat", rating=3)
    shape = json.loads(grammar(backend).source)["format"]
    assert (shape["type"], shape["stop_after_first"]) == ("tags_with_separator", True)


def test_json_mode_without_a_schema_is_any_object(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    assert chat.with_structured_output(method="json_mode").invoke("Go") == json.loads(TEXT)
    assert grammar(backend) == Grammar("json_object")


def test_raw_answer_comes_along_and_bad_ones_raise_nothing(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    model = chat.with_structured_output(Joke, include_raw=True)
    good = model.invoke("Go")
    assert good["parsed"] == Joke(setup="A cat", rating=3)
    assert good["raw"].content == TEXT
    assert good["parsing_error"] is None
    backend.says = [TEXT[:10]]
    bad = model.invoke("Go")
    assert bad["parsed"] is None
    assert bad["raw"].content == TEXT[:10]
    assert isinstance(bad["parsing_error"], OutputParserException)


def test_with_tools_the_model_may_call_them_or_answer(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    model = chat.with_structured_output(Joke, tools=[look])
    assert model.invoke("Go") == Joke(setup="A cat", rating=3)
    assert json.loads(grammar(backend).source)["format"]["type"] == "or"
    backend.says = [CALL]
    answer = model.invoke("Go")
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls[0]["name"] == "look"


def test_recursive_schema_keeps_its_references(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    backend.says = ['{"children": [{"children": []}]}']
    found = chat.with_structured_output(Tree).invoke("Go")
    assert found == Tree(children=[Tree(children=[])])
    assert "$ref" in grammar(backend).source


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": Joke, "method": "magic"}, "method='magic': known are json_schema"),
        ({"schema": None}, "needs a schema"),
        ({"schema": 3}, "schema 3 cannot be read"),
        ({"schema": Joke, "method": "function_calling", "tools": [look]}, "exclude each other"),
    ],
)
def test_what_cannot_be_structured_is_refused_at_once(
    chat: ChatCacheSlide, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        chat.with_structured_output(**options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}},
            Grammar("json_schema", '{"type": "string"}'),
        ),
        (
            {"type": "object", "properties": {}},
            Grammar("json_schema", '{"type": "object", "properties": {}}'),
        ),
    ],
)
def test_response_format_of_one_call_is_kept_to(
    chat: ChatCacheSlide, backend: FakeBackend, given: Any, expected: Grammar | None
) -> None:
    chat.invoke("Go", response_format=given)
    assert backend.requests[-1].grammar == expected


def test_grammar_of_ones_own_stands_alone(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    chat.invoke("Go", grammar=("regex", "[0-9]+"))
    assert grammar(backend) == Grammar("regex", "[0-9]+")
    with pytest.raises(RequestError, match="grammar= stands alone"):
        chat.bind_tools([look]).invoke("Go", grammar=("regex", "x"))
    with pytest.raises(RequestError, match="response_format must look like"):
        chat.invoke("Go", response_format={"type": "json_schema"})


@pytest.mark.parametrize("piece", [1, 4, 500])
@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_thoughts_are_kept_apart_counted_and_not_sent_again(
    backend: FakeBackend, piece: int, output_version: str
) -> None:
    backend.says, backend.piece = ["<think>\nHm, <b> it is.\n</think>\n\nIt is 3."], piece
    chat = ChatCacheSlide(backend=backend, output_version=output_version)
    first, *pieces = chat.stream("1 + 2?")
    streamed = first
    for more in pieces:
        streamed += more
    for answer in (chat.invoke("1 + 2?"), streamed):
        assert answer.text == "It is 3."
        blocks = {block["type"]: block for block in answer.content_blocks}
        assert blocks["reasoning"]["reasoning"] == "Hm, <b> it is."  # type: ignore[typeddict-item]
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 10
    chat.invoke([HumanMessage("1 + 2?"), streamed, HumanMessage("Sure?")])
    assert "Hm, <b>" not in backend.prompt(backend.requests[-1])
    assert "It is 3." in backend.prompt(backend.requests[-1])


def test_thoughts_that_never_end_are_no_answer(chat: ChatCacheSlide, backend: FakeBackend) -> None:
    backend.says, backend.ends = ["<think>Hm"], "length"
    answer = chat.invoke("Go")
    assert answer.content == ""
    assert answer.additional_kwargs["reasoning_content"] == "Hm"


def test_text_that_only_looks_like_thought_stays_text(
    chat: ChatCacheSlide, backend: FakeBackend
) -> None:
    for text in ("<thin", "I <think> so", " <b>"):
        backend.says = [text]
        assert chat.invoke("Go").content == text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_in_openais_shape(
    chat: ChatCacheSlide, backend: FakeBackend, stream: bool
) -> None:
    backend.says = ["né"]
    bound = chat.bind(logprobs=True, top_logprobs=2)
    answer: Any = bound.invoke("Go")
    if stream:
        first, *pieces = bound.stream("Go")
        answer = first
        for piece in pieces:
            answer += piece
    content = answer.response_metadata["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5] * 3
    assert content[0]["token"] == "n"
    assert content[0]["bytes"] == [110]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 3}, "logprobs=3 must be True or False"),
        ({"top_logprobs": 2}, "needs logprobs=True"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs=1000 must be None, or from 0"),
        ({"timeout": 0}, "timeout=0 must be a number of seconds"),
        ({"max_retries": -1}, "max_retries=-1 must be at least 0"),
        ({"n": 0}, "n=0 must be from 1 to 1024"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    chat: ChatCacheSlide, backend: FakeBackend, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        chat.invoke("Go", **options)
    assert backend.requests == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_n_answers_to_one_prompt_are_n_generations_whose_usage_adds_up(
    chat: ChatCacheSlide, backend: FakeBackend, asynchronous: bool
) -> None:
    backend.says = ["one", "two!"]
    messages: list[list[BaseMessage]] = [[HumanMessage("Go")]]
    bound: dict[str, Any] = {"n": 2}
    if asynchronous:
        result = asyncio.run(chat.agenerate(messages, **bound))
    else:
        result = chat.generate(messages, **bound)
    found = [g for g in result.generations[0] if isinstance(g, ChatGeneration)]
    assert [generation.text for generation in found] == ["one", "two!"]
    usages = [generation.message.usage_metadata for generation in found]  # type: ignore[attr-defined]
    prompt = len(backend.requests[0].prompt_ids)
    assert [usage["input_tokens"] for usage in usages] == [prompt, 0]
    assert [usage["output_tokens"] for usage in usages] == [3, 4]
    assert len(backend.requests) == 1
    with pytest.raises(RequestError, match="n=2 answers cannot be streamed"):
        next(chat.stream("Go", n=2))
