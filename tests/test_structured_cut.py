"""Structured answers that break off: never data that look whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from pydantic import BaseModel

from langchain_cacheslide import ChatCacheSlide

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend


class Payment(BaseModel):
    """A payment."""

    account: str
    amount: int


WHOLE = '{"account": "DE12 3456", "amount": 12500}'
CUT = WHOLE[:-4]
CALL = '<tool_call>\n{"name": "Payment", "arguments": '
METHODS = ["json_schema", "json_mode", "function_calling"]
SCHEMAS = [Payment, Payment.model_json_schema()]


@pytest.fixture
def backend(support: Callable[[str], ModuleType]) -> FakeBackend:
    fake: FakeBackend = support("fake_backend").FakeBackend(ends="length", piece=4)
    return fake


def asked(
    backend: FakeBackend, text: str, schema: Any, method: str, *, include_raw: bool = False
) -> Any:
    backend.says = [CALL + text if method == "function_calling" else text]
    chat = ChatCacheSlide(backend=backend)
    return chat.with_structured_output(schema, method=method, include_raw=include_raw)


async def streamed(model: Any, seen: list[Any]) -> None:
    async for piece in model.astream("Pay"):
        seen.append(piece)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("text", [CUT, WHOLE[:15]])
def test_answer_that_max_tokens_cut_off_says_so(
    backend: FakeBackend, schema: Any, method: str, text: str
) -> None:
    model = asked(backend, text, schema, method)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        model.invoke("Pay")
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        asyncio.run(model.ainvoke("Pay"))
    raw = asked(backend, text, schema, method, include_raw=True)
    for told in (raw.invoke("Pay"), asyncio.run(raw.ainvoke("Pay")), list(raw.stream("Pay"))[-1]):
        assert told["parsed"] is None
        assert "raise max_tokens" in str(told["parsing_error"])
        assert told["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_stream_that_was_cut_off_grows_and_then_says_so(
    backend: FakeBackend, schema: Any, method: str, asynchronous: bool
) -> None:
    model = asked(backend, CUT, schema, method)
    seen: list[Any] = []
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        if asynchronous:
            asyncio.run(streamed(model, seen))
        else:
            for piece in model.stream("Pay"):
                seen.append(piece)
    assert seen


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_stream_of_a_whole_answer_ends_in_the_whole(
    backend: FakeBackend, schema: Any, method: str
) -> None:
    backend.ends = "stop"
    closed = WHOLE + "}\n</tool_call>" if method == "function_calling" else WHOLE
    *_, last = asked(backend, closed, schema, method).stream("Pay")
    found = last if isinstance(last, dict) else last.model_dump()
    assert found == {"account": "DE12 3456", "amount": 12500}


def test_cancelled_answer_is_not_blamed_on_max_tokens(backend: FakeBackend) -> None:
    backend.ends = "cancelled"
    with pytest.raises(OutputParserException, match="it was cancelled"):
        asked(backend, CUT, Payment, "json_schema").invoke("Pay")


def test_object_that_was_closed_is_whole_whatever_ended_the_answer(backend: FakeBackend) -> None:
    found = asked(backend, WHOLE, Payment, "json_schema").invoke("Pay")
    assert found == Payment(account="DE12 3456", amount=12500)


def test_number_that_may_have_gone_on_is_not_whole(backend: FakeBackend) -> None:
    number = {"title": "amount", "type": "integer"}
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        asked(backend, "12", number, "json_schema").invoke("Pay")
    backend.ends = "stop"
    assert asked(backend, "12", number, "json_schema").invoke("Pay") == 12


@pytest.mark.parametrize(
    "text",
    ["", CUT, "12,5", "12 or so", "Sure: " + WHOLE, "```json\n" + CUT, "true\n```json\n" + CUT],
)
def test_text_that_is_no_json_is_not_mended(backend: FakeBackend, text: str) -> None:
    backend.ends = "stop"
    with pytest.raises(OutputParserException):
        asked(backend, text, SCHEMAS[1], "json_mode").invoke("Pay")


def test_json_in_a_fence_and_with_line_breaks_is_read(backend: FakeBackend) -> None:
    backend.ends = "stop"
    text = '```json\n{"account": "DE\n12", "amount": 3}\n```'
    found = asked(backend, text, Payment, "json_mode").invoke("Pay")
    assert found == Payment(account="DE\n12", amount=3)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize(
    "text",
    [
        f"{WHOLE} or so",
        f"{WHOLE}}}",
        f"{WHOLE}\n{CUT}",
        f"```json\n{WHOLE}\n```\nThat is what I read.",
        f"That is what I read:\n```\n{WHOLE}\n```",
        f"12 things:\n```json\n{WHOLE}```\nWhat else?",
    ],
)
def test_words_around_the_json_cost_an_answer_only_if_it_was_cut_off(
    backend: FakeBackend, schema: Any, text: str
) -> None:
    backend.ends = "stop"
    for found in (
        asked(backend, text, schema, "json_mode").invoke("Pay"),
        list(asked(backend, text, schema, "json_mode").stream("Pay"))[-1],
    ):
        assert (found if isinstance(found, dict) else found.model_dump()) == json.loads(WHOLE)
    backend.ends = "length"
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        asked(backend, text, schema, "json_mode").invoke("Pay")


@pytest.mark.parametrize("text", [f"```json\n{WHOLE}", f"\n```\n{WHOLE}\n```\n", f" {WHOLE}\n"])
def test_fence_and_white_space_are_no_words_around_the_json(
    backend: FakeBackend, text: str
) -> None:
    found = asked(backend, text, Payment, "json_mode").invoke("Pay")
    assert found == Payment(account="DE12 3456", amount=12500)


def test_schema_that_langchains_traces_cannot_read_is_answered(backend: FakeBackend) -> None:
    backend.ends = "stop"
    schema = {"title": "h", "type": ["object", "null"], "properties": {}}
    assert asked(backend, "null", schema, "json_schema").invoke("Pay") is None
    assert asked(backend, "{}", schema, "json_schema").invoke("Pay") == {}


def test_answer_in_text_calls_nothing_and_is_none(backend: FakeBackend) -> None:
    backend.ends, backend.says = "stop", ["I will not."]
    chat = ChatCacheSlide(backend=backend)
    model = chat.with_structured_output(Payment, method="function_calling", include_raw=True)
    told = model.invoke("Pay")
    assert (told["parsed"], told["parsing_error"]) == (None, None)
    assert isinstance(told["raw"], AIMessage)
