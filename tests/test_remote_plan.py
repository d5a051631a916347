"""The chunk plan on the wire, and RemoteChat against a server that wants one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk, HumanMessage

from cacheslide_agents.backend import Receipt
from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.wire_plan import (
    MOST_CHUNKS,
    PlannedChunk,
    WirePlan,
    digest_of_ids,
    digest_of_text,
    plan_of,
    read_plan,
)
from langchain_cacheslide.messages import from_messages, to_messages
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote import RemoteChat
from langchain_cacheslide.remote_receipt import NO_RECEIPT

if TYPE_CHECKING:
    from tests.support.openai_server import OpenAIServer

PROMPT = ChunkedPrompt(
    (
        Message("system", (Chunk("rules", "Be brief. ", Role.REUSE), Chunk("memory", "It rains."))),
        Message("user", (Chunk("question", "Does it?", Role.REUSE),)),
    ),
    task="weather",
)
ASKED = Question(to_messages(PROMPT), {})
RECEIPT = Receipt("chatcmpl-1", "cacheslide", "partial", "", 12, 9, 3, 0.25, False).to_dict()
SETTINGS = {"namespace": "tenant", "session": "run-1", "reuse": True, "policy": "cacheslide"}
names = st.text(min_size=1, max_size=20)


@pytest.fixture
def server(support: Callable[[str], ModuleType]) -> Iterator[OpenAIServer]:
    with support("openai_server").OpenAIServer(status={"plan_versions": [1]}) as running:
        yield running


@pytest.fixture(scope="module")
def encoder(support: Callable[[str], ModuleType]) -> ChatEncoder:
    return ChatEncoder(support("fake_backend").byte_tokenizer())


@st.composite
def plans(draw: st.DrawFn) -> WirePlan:
    ids = draw(st.lists(names, unique=True, max_size=6))
    roles, lengths = st.sampled_from(Role), st.integers(0, 2**31 - 1)
    return WirePlan(
        draw(st.sampled_from(["characters", "tokens"])),
        draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        tuple(PlannedChunk(name, draw(roles), draw(lengths)) for name in ids),
        draw(names),
        draw(names),
        draw(st.none() | names),
        draw(st.none() | names),
    )


@settings(max_examples=50)
@given(plans())
def test_plan_survives_the_wire(plan: WirePlan) -> None:
    assert read_plan(json.loads(json.dumps(plan.to_dict()))) == plan


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(plans(), st.data())
def test_plan_of_a_stranger_is_read_or_refused(plan: WirePlan, data: st.DataObject) -> None:
    sent: dict[str, Any] = json.loads(json.dumps(plan.to_dict()))
    sent[data.draw(st.sampled_from(sorted(sent)))] = data.draw(json_values)
    if data.draw(st.booleans()) and isinstance(sent["chunks"], list):
        sent["chunks"] = [*sent["chunks"], data.draw(json_values)]
    try:
        read = read_plan(sent)
    except RequestError as error:
        assert len(str(error)) < 500
    else:
        assert read.to_dict() == sent


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "its version is 2, not 1"),
        ({"unit": "bytes"}, "its unit 'bytes' is unknown"),
        ({"digest": "0" * 31}, "its digest must be 32 hexadecimal digits"),
        ({"namespace": ""}, "its namespace must be a string of 1 to 256 characters"),
        ({"task": "x" * 257}, "its task must be a string"),
        ({"session": 3}, "its session must be a string"),
        ({"chunks": [["a", "reuse", 1]] * 2}, "a chunk id appears twice"),
        ({"chunks": [["a", "reuse", -1]]}, "chunk 'a' has no sensible length"),
        ({"chunks": [["a", "reuse", True]]}, "chunk 'a' has no sensible length"),
        ({"chunks": [["a", "keep", 1]]}, "the role 'keep' is unknown"),
        ({"chunks": [["a", "reuse"]]}, r"a chunk is no \[id, role, length\]"),
        ({"chunks": [[str(i), "reuse", 1] for i in range(1025)]}, "it has 1025 chunks"),
        ({"extra": 1}, "it has unknown fields: extra"),
    ],
)
def test_plan_a_server_must_not_accept_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_plan({**plan_of(PROMPT).to_dict(), **change})
    with pytest.raises(RequestError, match="it lacks task"):
        read_plan({name: v for name, v in plan_of(PROMPT).to_dict().items() if name != "task"})
    with pytest.raises(RequestError, match="it is no JSON object"):
        read_plan([change])


def test_plan_in_characters_cuts_the_messages_as_the_chunks_do() -> None:
    plan = plan_of(PROMPT, namespace="tenant")
    assert plan.to_dict() == {
        "version": 1,
        "unit": "characters",
        "digest": digest_of_text([("system", "Be brief. It rains."), ("user", "Does it?")]),
        "namespace": "tenant",
        "task": "weather",
        "session": None,
        "policy": None,
        "chunks": [["rules", "reuse", 10], ["memory", "recompute", 9], ["question", "reuse", 8]],
    }
    assert plan.length == sum(len(message.content) for message in PROMPT.messages)


def test_plan_in_tokens_is_bound_to_the_ids(encoder: ChatEncoder) -> None:
    encoded = encoder.encode(PROMPT)
    plan = plan_of(encoded)
    assert (plan.unit, plan.task, plan.length) == ("tokens", "weather", len(encoded.ids))
    assert [chunk.id for chunk in plan.chunks] == [span.id for span in encoded.spans]
    assert plan.digest == digest_of_ids(encoded.ids) != digest_of_ids(encoded.ids[::-1])


def test_digests_tell_neighbouring_prompts_apart() -> None:
    turns = [("user", "a"), ("user", "b")]
    others = [[("user", "ab")], [("user", "a"), ("assistant", "b")], turns[:1], turns[::-1]]
    assert digest_of_text(turns) not in map(digest_of_text, others)
    assert digest_of_ids([1, 256]) != digest_of_ids([1, 0, 1])


def test_server_that_wants_plans_gets_one_it_can_check(server: OpenAIServer) -> None:
    RemoteChat(server.url).call(Question(to_messages(PROMPT), SETTINGS)).generate()
    (plan,) = server.plans
    assert plan == plan_of(PROMPT, namespace="tenant", session="run-1", policy="cacheslide")
    (body,) = server.bodies()
    assert [message["content"] for message in body["messages"]] == [
        "Be brief. It rains.",
        "Does it?",
    ]


def test_reuse_switched_off_asks_the_server_for_a_dense_answer(server: OpenAIServer) -> None:
    RemoteChat(server.url).call(
        Question(to_messages(PROMPT), {**SETTINGS, "reuse": False})
    ).generate()
    assert [plan.policy for plan in server.plans] == ["recompute"]


def test_plan_can_be_bound_to_the_servers_own_tokens(
    server: OpenAIServer, encoder: ChatEncoder
) -> None:
    remote = RemoteChat(
        server.url,
        cut=lambda messages, task, tools, namespace: encoder.encode(from_messages(messages, task)),
    )
    remote.call(Question(to_messages(PROMPT), SETTINGS)).generate()
    (plan,) = server.plans
    assert (plan.unit, plan.digest) == ("tokens", digest_of_ids(encoder.encode(PROMPT).ids))


@pytest.mark.parametrize("in_answer", [True, False])
def test_servers_own_receipt_is_the_answers(server: OpenAIServer, in_answer: bool) -> None:
    server.receipt, server.receipt_in_answer = RECEIPT, in_answer
    message: Any = RemoteChat(server.url).call(ASKED).generate().generations[0].message
    assert message.response_metadata["cacheslide"] == RECEIPT
    assert message.usage_metadata["input_token_details"] == {"cache_read": 9, "cache_creation": 3}
    assert server.asked("/v1/cacheslide/receipts/chatcmpl-1") == (0 if in_answer else 1)


def test_stream_fetches_its_receipt_afterwards(server: OpenAIServer) -> None:
    server.receipt = RECEIPT
    last = [*RemoteChat(server.url).call(ASKED).stream()][-1].message
    assert isinstance(last, AIMessageChunk)
    assert last.response_metadata["cacheslide"] == RECEIPT
    assert last.usage_metadata is not None
    assert last.usage_metadata["input_token_details"]["cache_read"] == 9


@pytest.mark.parametrize(
    "receipt", [None, {}, {**RECEIPT, "outcome": "great"}, {**RECEIPT, "reused_tokens": "9"}]
)
def test_receipt_that_is_missing_or_none_never_fails_the_answer(
    server: OpenAIServer, receipt: dict[str, Any] | None
) -> None:
    server.receipt = receipt
    message = RemoteChat(server.url).call(ASKED).generate().generations[0].message
    assert message.content == "Does it?"
    found = message.response_metadata["cacheslide"]
    assert (found["outcome"], found["reason"], found["exact"]) == ("declined", NO_RECEIPT, False)


def test_server_of_another_version_gets_no_plan(server: OpenAIServer) -> None:
    server.status = {"plan_versions": [7]}
    message = RemoteChat(server.url).call(ASKED).generate().generations[0].message
    assert message.response_metadata["cacheslide"]["reason"] == (
        "the server reads plan versions [7], not 1"
    )
    assert "kv_transfer_params" not in server.bodies()[0]


def test_prompt_that_cannot_be_planned_is_answered_without_a_plan(server: OpenAIServer) -> None:
    many = [HumanMessage(f"message {i}") for i in range(MOST_CHUNKS + 1)]
    message = RemoteChat(server.url).call(Question(many, {})).generate().generations[0].message
    assert message.content == f"message {MOST_CHUNKS}"
    reason = message.response_metadata["cacheslide"]["reason"]
    assert reason.startswith("no chunk plan was sent: the chunk plan cannot be used: it has 1025")
    assert server.plans == []


def test_picture_is_sent_as_it_is_without_a_plan(server: OpenAIServer) -> None:
    server.pieces = [{"content": "a cat"}]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = HumanMessage([{"type": "text", "text": "What is this?"}, picture])
    message = RemoteChat(server.url).call(Question([asked], {})).generate().generations[0].message
    assert message.content == "a cat"
    assert message.response_metadata["cacheslide"]["reason"].startswith("no chunk plan was sent")
    (body,) = server.bodies()
    assert body["messages"][0]["content"] == [{"type": "text", "text": "What is this?"}, picture]
