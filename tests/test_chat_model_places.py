"""ChatCacheSlide in LangChain's own machinery: caches, rebuilt models, listeners, error kinds."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from langchain_core import exceptions as langchain
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel

from cacheslide_agents.errors import ContextOverflowError, RequestTimeoutError
from cacheslide_agents.prompt.calls import HERMES, LLAMA3, MISTRAL, CallFormat
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.binding import json_schema
from langchain_cacheslide.toolcalls import CallPiece, CallReader

URL = "http://localhost:1/v1"


class Person(BaseModel):
    name: str
    age: int


@tool
def look(query: str) -> str:
    """Look something up."""
    return query


@pytest.fixture
def fakes(support: Callable[[str], ModuleType]) -> Any:
    return support("fake_backend")


def thinking(fakes: Any, says: str) -> ChatCacheSlide:
    """A model whose prompts end inside a thought."""
    tokenizer = fakes.byte_tokenizer()
    tokenizer.chat_template = fakes.CHATML.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    return ChatCacheSlide(backend=fakes.FakeBackend(tokenizer=tokenizer, says=[says]))


def test_two_models_of_one_name_share_no_cached_answer(fakes: Any) -> None:
    cache = InMemoryCache()
    answers = []
    for said in ("from A", "from B"):
        backend = fakes.FakeBackend(says=[said, "asked twice"])
        backend.model_id = "final"
        chat = ChatCacheSlide(backend=backend, cache=cache)
        answers.append([chat.invoke("hi").content for _ in range(2)])
    assert answers == [["from A", "from A"], ["from B", "from B"]]


def test_a_model_made_of_anothers_fields_asks_in_the_same_place(
    fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = ChatCacheSlide(base_url=URL, model="m")
    assert ChatCacheSlide(**remote.model_dump()).base_url == URL
    monkeypatch.setenv("CACHESLIDE_BASE_URL", URL)
    assert ChatCacheSlide().is_remote
    local = ChatCacheSlide(backend=fakes.FakeBackend(says=["here", "here"]))
    assert not local.is_remote
    field = ConfigurableField(id="warmth")
    configurable: Any = local.configurable_fields(temperature=field)
    assert configurable.with_config(configurable={"warmth": 0.5}).invoke("hi").content == "here"
    named = ChatCacheSlide(**ChatCacheSlide(backend="torch").model_dump())
    assert (named.backend, named.base_url) == ("torch", None)


async def test_several_answers_are_given_while_somebody_listens(fakes: Any) -> None:
    chat = ChatCacheSlide(backend=fakes.FakeBackend(says=["one"] * 9), n=2, streaming=True)
    result = chat.generate([[HumanMessage("hi")]])
    assert len(result.generations[0]) == 2
    bound = ChatCacheSlide(backend=fakes.FakeBackend(says=["one"] * 9)).bind(n=2)

    async def ask(_: Any) -> Any:
        return await bound.ainvoke("hi")

    heard = [event async for event in RunnableLambda(ask).astream_events(1, version="v2")]
    assert heard[-1]["data"]["output"].content == "one"
    with pytest.raises(Exception, match="cannot be streamed"):
        list(bound.stream("hi"))


def test_a_prompt_that_is_too_long_is_langchains_error_too(fakes: Any) -> None:
    class Full(fakes.FakeBackend):  # type: ignore[misc]
        def generate(self, request: Any) -> Any:
            raise ContextOverflowError(600, 512)
            yield

    with pytest.raises(langchain.ContextOverflowError, match="600 tokens") as caught:
        ChatCacheSlide(backend=Full()).invoke("hi")
    assert isinstance(caught.value, ContextOverflowError)


def test_an_answer_that_takes_too_long_is_langchains_error_too(fakes: Any) -> None:
    class Late(fakes.FakeBackend):  # type: ignore[misc]
        def generate(self, request: Any) -> Any:
            raise RequestTimeoutError(3.0)
            yield

    with pytest.raises(langchain.ModelTimeoutError, match="after 3 s") as caught:
        ChatCacheSlide(backend=Late()).invoke("hi")
    assert isinstance(caught.value, TimeoutError)


def test_a_form_that_is_forced_is_no_thought(fakes: Any) -> None:
    said = '{"name": "Ann", "age": 3}'
    answer = thinking(fakes, said).with_structured_output(Person).invoke("Who?")
    assert answer == Person(name="Ann", age=3)
    call = '<tool_call>\n{"name": "look", "arguments": {"query": "x"}}\n</tool_call>'
    message = thinking(fakes, call).bind_tools([look], tool_choice="any").invoke("Who?")
    assert [each["name"] for each in message.tool_calls] == ["look"]
    free = thinking(fakes, "Hm.</think>Ann.").invoke("Who?")
    assert (free.content, free.additional_kwargs["reasoning_content"]) == ("Ann.", "Hm.")


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (LLAMA3, '{"name": "Ann", "age": 3}'),
        (MISTRAL, '[{"name": "Ann", "age": 3}]'),
        (MISTRAL, '[{"name": "Ann", "age": 3}, {"name": "Bob", "age": 4}]'),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_name_without_arguments_that_no_tool_has_is_said(
    style: CallFormat, text: str, size: int
) -> None:
    reader = CallReader(style, {"look"})
    said = ""
    calls: list[CallPiece] = []
    for at in range(0, len(text), size):
        more, pieces = reader.feed(text[at : at + size])
        said, calls = said + more, calls + pieces
    more, pieces = reader.finish()
    assert (said + more, calls + pieces, reader.count) == (text, [], 0)


@pytest.mark.parametrize("style", [HERMES, LLAMA3, MISTRAL])
def test_a_tool_may_be_called_without_arguments(style: CallFormat) -> None:
    reader = CallReader(style, {"look"})
    text = style.marker + ('look"}' if style is not HERMES else '{"name": "look"}')
    _, pieces = reader.feed(text + style.end)
    assert [(piece.name, piece.arguments) for piece in pieces] == [("look", "{}")]


@pytest.mark.parametrize("wrapped", ["function", "json_schema"])
def test_openais_wrapping_of_a_schema_is_opened(wrapped: str) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "title": "person"}
    key = {"function": "parameters", "json_schema": "schema"}[wrapped]
    given = {"type": wrapped, wrapped: {"name": "person", "description": "Who.", key: schema}}
    assert json_schema(given)["properties"] == schema["properties"]
