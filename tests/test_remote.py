"""RemoteChat against a plain server: answers, streams, tools, settings, usage, receipts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGenerationChunk

from cacheslide_agents.errors import BackendError, ModelNotFoundError, RequestError
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote import RemoteChat
from langchain_cacheslide.remote_question import Patience
from langchain_cacheslide.remote_receipt import NO_PLUGIN
from langchain_cacheslide.remote_server import Server

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

ASK = [HumanMessage("one two three")]
OPENAI_FIELDS = {"messages", "model", "stream", "stream_options", "temperature", "max_tokens"}
SETTINGS = {
    "temperature": 0.0,
    "max_tokens": 7,
    "top_p": None,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "stop": None,
    "logprobs": None,
    "n": 1,
    "namespace": "tenant",
    "task": None,
    "session": "run-1",
    "reuse": True,
    "policy": None,
}
ASKED = Question(ASK, SETTINGS)
CALLS = [
    {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
    {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "now", "arguments": ""}}]},
]


@pytest.fixture
def server(support: Callable[[str], ModuleType]) -> Iterator[OpenAIServer]:
    with support("openai_server").OpenAIServer() as running:
        yield running


@pytest.fixture
def chat(server: OpenAIServer) -> RemoteChat:
    return RemoteChat(server.url)


def whole(chunks: Iterator[ChatGenerationChunk]) -> AIMessageChunk:
    pieces = [chunk.message for chunk in chunks]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    assert isinstance(total, AIMessageChunk)
    return total


def test_stream_gives_every_piece_as_the_server_sent_it(chat: RemoteChat) -> None:
    chunks = list(chat.call(ASKED).stream())
    assert [chunk.text for chunk in chunks] == ["one", " two", " three", ""]
    last = chunks[-1].message
    assert isinstance(last, AIMessageChunk)
    assert last.chunk_position == "last"
    assert last.response_metadata["finish_reason"] == "stop"
    assert last.response_metadata["model_name"] == "tiny"


def test_whole_answer_says_what_the_stream_says(chat: RemoteChat) -> None:
    streamed = whole(chat.call(ASKED).stream())
    (generation,) = chat.call(ASKED).generate().generations
    message = generation.message
    assert message.content == streamed.content == "one two three"
    receipts = [m.response_metadata.pop("cacheslide") for m in (message, streamed)]
    assert message.response_metadata == streamed.response_metadata
    assert [{**receipt, "ttft_s": 0} for receipt in receipts] == [receipts[0]] * 2
    assert receipts[1]["ttft_s"] > 0


def test_plain_server_sees_no_field_that_openai_does_not_have(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    whole(chat.call(ASKED).stream())
    chat.call(ASKED).generate()
    streamed, given = server.bodies()
    assert set(streamed) == OPENAI_FIELDS
    assert set(given) == OPENAI_FIELDS - {"stream_options"}
    assert given["messages"] == [{"role": "user", "content": "one two three"}]


def test_server_is_asked_once_for_its_models_and_its_status(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    for _ in range(3):
        chat.call(ASKED).generate()
    assert server.asked("/v1/models") == server.asked("/v1/cacheslide/status") == 1


def test_receipt_of_a_plain_server_says_that_reuse_is_off(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    message = whole(chat.call(ASKED).stream())
    receipt = message.response_metadata["cacheslide"]
    assert (receipt["outcome"], receipt["reason"]) == ("declined", NO_PLUGIN)
    assert (receipt["prompt_tokens"], receipt["reused_tokens"], receipt["exact"]) == (12, 0, True)
    assert receipt["request_id"] == "chatcmpl-1"
    json.dumps(receipt)


@pytest.mark.parametrize("streamed", [True, False])
def test_servers_own_prefix_cache_counts_as_cache_read(
    chat: RemoteChat, server: OpenAIServer, streamed: bool
) -> None:
    server.usage = {
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    if streamed:
        message: Any = whole(chat.call(ASKED).stream())
    else:
        message = chat.call(ASKED).generate().generations[0].message
    assert message.usage_metadata == {
        "input_tokens": 12,
        "output_tokens": 3,
        "total_tokens": 15,
        "input_token_details": {"cache_read": 8},
        "output_token_details": {"reasoning": 2},
    }
    receipt = message.response_metadata["cacheslide"]
    assert receipt["reason"] == f"{NO_PLUGIN}; its own prefix cache served 8 tokens"
    assert (receipt["reused_tokens"], receipt["active_tokens"]) == (8, 4)
    assert receipt["compute_fraction"] == pytest.approx(4 / 12)


def test_server_that_counts_nothing_is_answered_without_usage(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    server.usage = {}
    assert whole(chat.call(ASKED).stream()).usage_metadata is None


def test_tool_calls_arrive_in_pieces_and_whole(chat: RemoteChat, server: OpenAIServer) -> None:
    server.pieces, server.finish_reason = CALLS, "tool_calls"
    add = {"name": "add", "args": {"x": 1}, "id": "a", "type": "tool_call"}
    now = {"name": "now", "args": {}, "id": "b", "type": "tool_call"}
    chunks = list(chat.call(ASKED).stream())
    first = chunks[0].message
    assert isinstance(first, AIMessageChunk)
    assert [call["args"] for call in first.tool_call_chunks] == ['{"x":']
    streamed = whole(iter(chunks))
    assert streamed.tool_calls == [add, now]
    assert streamed.response_metadata["finish_reason"] == "tool_calls"

    server.pieces = [
        {
            "tool_calls": [
                {"id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}},
                {"id": "b", "function": {"name": "now", "arguments": ""}},
                {"id": "c", "function": {"name": "add", "arguments": "{no"}},
                {"id": "d", "function": {"name": "add", "arguments": "[1]"}},
            ]
        }
    ]
    message: Any = chat.call(ASKED).generate().generations[0].message
    assert message.tool_calls == [add, now]
    invalid = [(call["id"], call["args"]) for call in message.invalid_tool_calls]
    assert invalid == [("c", "{no"), ("d", "[1]")]


def test_tool_calls_without_index_are_numbered_by_their_place(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    names = ("add", "sub")
    server.pieces = [
        {"tool_calls": [{"id": n, "function": {"name": n, "arguments": "{}"}} for n in names]}
    ]
    assert [call["name"] for call in whole(chat.call(ASKED).stream()).tool_calls] == [*names]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_kept_apart_from_the_answer(
    chat: RemoteChat, server: OpenAIServer, name: str
) -> None:
    server.pieces = [{name: "let me"}, {name: " think"}, {"content": "42"}]
    streamed = whole(chat.call(ASKED).stream())
    message = chat.call(ASKED).generate().generations[0].message
    for answer in (streamed, message):
        assert answer.content == "42"
        assert answer.additional_kwargs["reasoning_content"] == "let me think"


def test_log_probabilities_stand_in_the_metadata(chat: RemoteChat, server: OpenAIServer) -> None:
    server.logprobs = True
    settings = {**SETTINGS, "logprobs": True, "top_logprobs": 1}
    streamed = whole(chat.call(Question(ASK, settings)).stream()).response_metadata["logprobs"][
        "content"
    ]
    assert [(entry["token"], entry["logprob"]) for entry in streamed] == [
        ("one", -0.5),
        (" two", -0.5),
        (" three", -0.5),
    ]
    assert streamed[0]["top_logprobs"][0]["logprob"] == -1.5
    message = chat.call(Question(ASK, settings)).generate().generations[0].message
    assert message.response_metadata["logprobs"]["content"][0]["token"] == "one two three"
    assert [body["top_logprobs"] for body in server.bodies()] == [1, 1]


def test_n_answers_come_from_one_request_and_are_counted_once(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    result = chat.call(Question(ASK, {**SETTINGS, "n": 3})).generate()
    assert [generation.text for generation in result.generations] == ["one two three"] * 3
    messages: list[Any] = [generation.message for generation in result.generations]
    assert [m.usage_metadata and m.usage_metadata["input_tokens"] for m in messages] == [
        12,
        None,
        None,
    ]
    assert [body["n"] for body in server.bodies()] == [3]


def test_settings_beyond_openai_travel_under_vllms_names(
    chat: RemoteChat, server: OpenAIServer
) -> None:
    knobs = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    chat.call(
        Question(ASK, {**SETTINGS, **knobs, "top_p": 0.9, "seed": 3, "stop": ["x", "y"]})
    ).generate()
    (body,) = server.bodies()
    assert {name: body[name] for name in knobs} == knobs
    assert (body["top_p"], body["seed"], body["stop"]) == (0.9, 3, ["x", "y"])


def test_model_is_the_only_one_the_server_has(chat: RemoteChat, server: OpenAIServer) -> None:
    assert chat.model == "tiny"
    server.models = ["a/one", "b/two"]
    assert chat.model == "tiny"
    message = r"serves 2 models: 'a/one', 'b/two'; say which with `model`"
    with pytest.raises(ModelNotFoundError, match=message):
        RemoteChat(server.url).call(ASKED).generate()
    named = RemoteChat(server.url, model="b/two")
    assert named.call(ASKED).generate().generations[0].text == "one two three"
    server.models = []
    with pytest.raises(ModelNotFoundError, match="serves 0 models: none"):
        RemoteChat(server.url).call(ASKED).generate()


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "ftp://host/v1", "", "http:///v1"])
def test_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="base_url must start with http"):
        RemoteChat(url)


@pytest.mark.parametrize("url", ["http://me:hush@host/v1", "http://host/v1?key=hush"])
def test_base_url_may_hold_no_secret_and_the_error_does_not_repeat_it(url: str) -> None:
    with pytest.raises(RequestError, match="use api_key for secrets") as raised:
        RemoteChat(url)
    assert "hush" not in str(raised.value)


def test_policy_object_is_refused_because_its_parameters_would_not_travel(
    chat: RemoteChat,
) -> None:
    class Mine:
        name = "cacheslide"

    with pytest.raises(RequestError, match="policy='cacheslide'"):
        chat.call(Question(ASK, {**SETTINGS, "policy": Mine()})).generate()


def test_nothing_of_openais_own_environment_reaches_the_server(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, "sk-for-someone-else")
    RemoteChat(server.url).call(ASKED).generate()
    assert len(server.requests) == 3
    assert "sk-for-someone-else" not in str(server.requests)


def test_missing_client_package_is_named_with_its_extra(
    chat: RemoteChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(BackendError, match=r"pip install 'cacheslide-agents\[remote\]'"):
        chat.call(ASKED).generate()


def test_importing_the_module_imports_no_client() -> None:
    code = f"import sys, {RemoteChat.__module__}; print('openai' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_status_that_could_not_be_had_is_asked_for_again_after_a_while(
    server: OpenAIServer,
) -> None:
    now = [0.0]
    server.status = {"unexpected": True}
    told = Server(server.url, None, "tiny", clock=lambda: now[0])
    server.status_code = 503
    assert told.facts(Patience()).reason == NO_PLUGIN
    assert told.facts(Patience()).reason == NO_PLUGIN
    assert server.asked("/v1/cacheslide/status") == 1
    now[0], server.status_code, server.status = 61.0, 200, {"plan_versions": [1]}
    assert told.facts(Patience()).reason == ""
    now[0] = 1e9
    assert told.facts(Patience()).reason == ""
    assert server.asked("/v1/cacheslide/status") == 2
