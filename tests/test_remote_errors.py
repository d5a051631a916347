"""RemoteChat against servers that refuse, fail, fall silent or go away."""

from __future__ import annotations

import logging
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core import exceptions as langchain
from langchain_core.messages import HumanMessage
from pydantic import SecretStr

from cacheslide_agents.errors import BackendError, ServerError
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote import RemoteChat

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

ASK = [HumanMessage("one two three four")]
KEY = "sk-very-secret-key"
ONCE: dict[str, Any] = {"max_retries": 0}
ASKED = Question(ASK, ONCE)


@pytest.fixture
def module(support: Callable[[str], ModuleType]) -> ModuleType:
    return support("openai_server")


@pytest.fixture
def server(module: ModuleType) -> Iterator[OpenAIServer]:
    with module.OpenAIServer() as running:
        yield running


def chat(server: OpenAIServer, **given: Any) -> RemoteChat:
    return RemoteChat(server.url, **{"model": "tiny", **given})


@pytest.mark.parametrize(
    ("status", "kind", "mend", "retryable"),
    [
        (400, langchain.ModelInvalidRequestError, "no can do", False),
        (403, langchain.ModelPermissionDeniedError, "does not allow this", False),
        (404, langchain.ModelNotFoundError, "check the model's name and base_url", False),
        (422, langchain.ModelInvalidRequestError, "no can do", False),
        (429, langchain.ModelRateLimitError, "raise max_retries or ask less often", True),
        (500, langchain.ModelAPIError, "no can do", True),
        (503, langchain.ModelAPIError, "no can do", True),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_refusal_is_our_error_and_langchains_of_that_kind(
    server: OpenAIServer,
    module: ModuleType,
    status: int,
    kind: type[langchain.ModelError],
    mend: str,
    retryable: bool,
    streamed: bool,
) -> None:
    server.failures = [module.Failure(status, "no can do")]
    with pytest.raises(kind, match=mend) as raised:
        list(chat(server).call(ASKED).stream()) if streamed else chat(server).call(ASKED).generate()
    error: Any = raised.value
    assert isinstance(error, ServerError)
    assert isinstance(error, BackendError)
    assert f"the server at {server.url} answered {status}: no can do" in str(error)
    assert (error.status, error.partial) == (status, "")
    assert raised.value.is_retryable is retryable
    assert pickle.loads(pickle.dumps(error)).status == status


def test_model_the_server_does_not_have_is_named(server: OpenAIServer) -> None:
    with pytest.raises(langchain.ModelNotFoundError, match="The model `other` does not exist"):
        chat(server, model="other").call(ASKED).generate()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("This model's maximum context length is 64 tokens.", None),
        ("too long", "context_length_exceeded"),
    ],
)
def test_prompt_that_does_not_fit_is_langchains_overflow_error(
    server: OpenAIServer, module: ModuleType, message: str, code: str | None
) -> None:
    server.failures = [module.Failure(400, message, code=code)]
    with pytest.raises(langchain.ContextOverflowError, match="shorten the prompt") as raised:
        chat(server).call(ASKED).generate()
    assert isinstance(raised.value, langchain.ModelInvalidRequestError)


def test_setting_a_server_does_not_know_is_named(server: OpenAIServer) -> None:
    server.refused = ("min_p",)
    settings = {**ONCE, "top_k": 4, "min_p": 0.2}
    with pytest.raises(ServerError, match="not every server knows min_p: leave"):
        chat(server).call(Question(ASK, settings)).generate()
    assert (
        chat(server).call(Question(ASK, {"top_k": 4})).generate().generations[0].text
        == "one two three four"
    )


def test_settings_beyond_openai_are_listed_when_the_server_names_none(
    server: OpenAIServer, module: ModuleType
) -> None:
    server.failures = [module.Failure(400, "bad request")]
    with pytest.raises(ServerError, match="not every server knows top_k, min_p: leave"):
        chat(server).call(Question(ASK, {**ONCE, "top_k": 4, "min_p": 0.2})).generate()


def test_busy_server_is_asked_again_before_the_call_fails(
    server: OpenAIServer, module: ModuleType
) -> None:
    busy = module.Failure(429, "busy", retry_after_ms=1)
    server.failures, more = [busy, busy], {"max_retries": 2}
    assert (
        chat(server).call(Question(ASK, more)).generate().generations[0].text
        == "one two three four"
    )
    server.failures = [busy] * 3
    with pytest.raises(langchain.ModelRateLimitError, match="busy"):
        chat(server).call(Question(ASK, more)).generate()
    assert len(server.bodies()) == 6


def test_refused_connection_asks_whether_the_server_runs() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        for model in ("tiny", None):
            remote = RemoteChat(url, model=model)
            with pytest.raises(langchain.ModelConnectionError, match="is it running") as raised:
                list(remote.call(ASKED).stream())
            assert f"the server at {url} cannot be reached" in str(raised.value)


def test_silent_server_is_a_timeout(server: OpenAIServer) -> None:
    server.hold_after = 0
    with pytest.raises(langchain.ModelTimeoutError, match="took too long; raise timeout"):
        chat(server).call(Question(ASK, {**ONCE, "timeout": 0.2})).generate()


def test_server_that_falls_silent_half_way_leaves_what_had_come(server: OpenAIServer) -> None:
    server.hold_after = 2
    with pytest.raises(langchain.ModelTimeoutError, match="after 2 pieces") as raised:
        list(chat(server).call(Question(ASK, {**ONCE, "timeout": 4.0})).stream())
    error: Any = raised.value
    assert (error.partial, error.pieces) == ("one two", 2)


@pytest.mark.parametrize("politely", [True, False])
def test_server_that_dies_half_way_leaves_what_had_come(
    server: OpenAIServer, politely: bool
) -> None:
    server.die_after, server.die_politely = 3, politely
    seen = []
    with pytest.raises(langchain.ModelConnectionError, match="after 3 pieces") as raised:
        for chunk in chat(server).call(Question(ASK, {"max_retries": 2})).stream():
            seen.append(chunk.text)
    error: Any = raised.value
    assert (error.partial, error.pieces, error.status) == ("one two three", 3, None)
    assert "13 characters" in str(error)
    assert seen == ["one", " two", " three"]
    assert len(server.bodies()) == 1


def test_error_within_a_stream_is_passed_on(server: OpenAIServer) -> None:
    piece = '{"choices": [{"index": 0, "delta": {"content": "so far"}}]}'
    server.events = [piece, '{"error": {"message": "out of memory", "code": 500}}']
    with pytest.raises(ServerError, match=r"after 1 piece of.*out of memory") as raised:
        list(chat(server).call(ASKED).stream())
    assert raised.value.partial == "so far"


@pytest.mark.parametrize("event", ["{not json", "[]", '"text"', '{"choices": [3]}', "null"])
def test_stream_nobody_can_read_is_a_server_error(server: OpenAIServer, event: str) -> None:
    server.events = [event]
    with pytest.raises(ServerError, match=f"the server at {server.url}"):
        list(chat(server).call(ASKED).stream())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": {"message": "boom"}}, "it reports an error: boom"),
        ({"error": "boom", "choices": []}, "it reports an error: boom"),
        ({"choices": [{"message": None}]}, "choice 0 of the answer holds no message"),
        ({"choices": []}, "holds no choices"),
    ],
)
def test_whole_answer_without_a_message_is_a_server_error(
    server: OpenAIServer, answer: dict[str, Any], said: str
) -> None:
    server.answer = answer
    with pytest.raises(langchain.ModelAPIError, match=f"gave no usable answer: .*{said}") as raised:
        chat(server).call(ASKED).generate()
    assert isinstance(raised.value, ServerError)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("arguments", ['{"account": "DE", "amount": 12', '{"account": "DE', ""])
def test_call_that_was_cut_off_is_invalid(
    server: OpenAIServer, arguments: str, streamed: bool
) -> None:
    server.finish_reason = "length"
    call = {"index": 0, "id": "a", "function": {"name": "pay", "arguments": arguments}}
    server.pieces = [{"tool_calls": [call]}]
    if streamed:
        first, *others = chat(server).call(ASKED).stream()
        message: Any = sum(others, first).message
    else:
        message = chat(server).call(ASKED).generate().generations[0].message
    assert message.tool_calls == []
    assert [bad["name"] for bad in message.invalid_tool_calls] == ["pay"]


@pytest.mark.parametrize("streamed", [True, False])
def test_only_the_last_call_without_arguments_can_have_been_cut_off(
    server: OpenAIServer, streamed: bool
) -> None:
    server.finish_reason = "length"
    calls = [
        {"index": place, "id": name, "function": {"name": name, "arguments": ""}}
        for place, name in enumerate("abc")
    ]
    server.pieces = [{"tool_calls": calls}]
    if streamed:
        first, *others = chat(server).call(ASKED).stream()
        message: Any = sum(others, first).message
    else:
        message = chat(server).call(ASKED).generate().generations[0].message
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("a", {}), ("b", {})]
    assert [bad["name"] for bad in message.invalid_tool_calls] == ["c"]


def test_key_is_sent_but_never_shown(
    server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.api_key = KEY
    caplog.set_level(logging.DEBUG)
    remote = chat(server, api_key=SecretStr(KEY))
    assert remote.call(ASKED).generate().generations[0].text == "one two three four"
    server.api_key = "another"
    with pytest.raises(langchain.ModelAuthenticationError, match="check api_key") as raised:
        remote.call(ASKED).generate()
    shown = [repr(remote), str(remote), *traceback.format_exception(raised.value), caplog.text]
    shown += [str(vars(remote)), repr(raised.value), str(vars(raised.value))]
    assert "Incorrect API key: Bearer **********" in str(raised.value)
    assert not [text for text in shown if KEY in text]
