"""From a client's plan to the server's annotation, without a server: binding, dropping, stamps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role
from cacheslide_agents.errors import RequestError
from cacheslide_agents.policies import CacheSlide, Epic
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.wire_plan import digest_of_ids, plan_of
from vllm_cacheslide.binding import Binding
from vllm_cacheslide.stamp import expect_stamp, stamped
from vllm_cacheslide.wire import MOST_TEXT, Annotation

PROMPT = ChunkedPrompt(
    (
        Message("system", (Chunk("rules", "Be kind. ", Role.REUSE), Chunk("day", "Monday."))),
        Message("user", (Chunk("empty", ""), Chunk("ask", "What moves?"))),
    ),
    task="talk",
)
MESSAGES = [{"role": each.role, "content": each.content} for each in PROMPT.messages]


@pytest.fixture
def encoder(tokenizers: Callable[[str], Any]) -> ChatEncoder:
    return ChatEncoder(tokenizers("qwen"))


def body(plan: Any, messages: Any = MESSAGES) -> dict[str, Any]:
    return {"messages": messages, "kv_transfer_params": {"cacheslide": plan}}


def annotated(encoder: ChatEncoder | str, given: dict[str, Any]) -> Annotation:
    return Binding(encoder, CacheSlide(), window=64).annotate(given, "tenant", "tenant/id")


def test_a_plan_in_characters_becomes_the_spans_of_the_servers_own_ids(
    encoder: ChatEncoder,
) -> None:
    plan = plan_of(PROMPT, namespace="mine", session="s", policy="epic").to_dict()
    found = annotated(encoder, body(json.loads(json.dumps(plan))))
    expected = encoder.encode(PROMPT)
    cut = [(span.id, span.role, span.start, span.stop) for span in found.spans]
    assert cut == [
        (span.id, span.role, span.start, span.stop) for span in expected.spans if span.id != "empty"
    ]
    assert found.digest == digest_of_ids(expected.ids)
    assert (found.request_id, found.namespace) == ("tenant/id", "tenant/mine")
    assert (found.task, found.session, found.policy, found.dropped) == ("talk", "s", Epic(), "")


def test_a_plan_in_tokens_is_cut_without_an_encoder(encoder: ChatEncoder) -> None:
    encoded = encoder.encode(PROMPT)
    found = annotated("no tokenizer", body(plan_of(encoded).to_dict()))
    bound = found.bound_to(encoded.ids)
    cut = [(span.id, span.role, span.start, span.stop) for span in bound.spans]
    assert cut == [(span.id, span.role, span.start, span.stop) for span in encoded.spans]
    digests = [digest_of_ids(encoded.ids[span.start : span.stop]) for span in encoded.spans]
    assert [span.digest for span in bound.spans] == digests
    assert not bound.dropped


def test_an_annotation_for_other_ids_is_dropped_with_its_spans(encoder: ChatEncoder) -> None:
    found = annotated(encoder, body(plan_of(PROMPT).to_dict()))
    other = found.bound_to([*encoder.encode(PROMPT).ids, 1])
    assert other.dropped.startswith("plan dropped: it is for other token ids")
    assert other.spans == ()


def test_an_annotation_without_a_digest_holds_for_any_ids() -> None:
    trusted = Annotation("r", "n", "t", None, (), CacheSlide(), True)
    assert trusted.bound_to([1, 2, 3]) is trusted


@pytest.mark.parametrize(
    ("changes", "messages", "reason"),
    [
        ({"digest": "0" * 32}, MESSAGES, "for other messages"),
        ({"policy": "nonsense"}, MESSAGES, "no policy is named 'nonsense'"),
        ({"chunks": [["a", "reuse", 27]]}, MESSAGES, "do not end where the messages end"),
        ({"chunks": [["a", "reuse", 16]]}, MESSAGES, "do not end where the messages end"),
        ({"chunks": [["a", "reuse", 16], ["b", "reuse", 12]]}, MESSAGES, "do not end"),
        (
            {"chunks": [["a", "reuse", 16], ["b", "reuse", 11], ["c", "reuse", 1]]},
            MESSAGES,
            "longer than the messages",
        ),
        ({"chunks": [["a", "reuse", 1 << 30]]}, MESSAGES, "more than the model's window"),
        ({}, None, "needs messages"),
        ({}, [{"role": "user", "content": [{"type": "image_url"}]}], "only text blocks"),
        ({}, [{"role": "owner", "content": "x"}], "unknown role"),
        ({"namespace": "x" * MOST_TEXT}, MESSAGES, "namespace must be"),
    ],
)
def test_a_plan_that_does_not_fit_is_dropped_with_the_reason(
    encoder: ChatEncoder, changes: dict[str, Any], messages: Any, reason: str
) -> None:
    found = annotated(encoder, body({**plan_of(PROMPT).to_dict(), **changes}, messages))
    assert found.dropped.startswith("plan dropped: ")
    assert reason in found.dropped
    assert (found.spans, found.namespace, found.request_id) == ((), "tenant", "tenant/id")


def test_without_an_encoder_plans_in_characters_are_dropped() -> None:
    found = annotated("the tokenizer is slow", body(plan_of(PROMPT).to_dict()))
    assert found.dropped.endswith("cannot cut by characters: the tokenizer is slow")


def test_only_the_servers_stamp_is_believed() -> None:
    params = stamped(Annotation("r", "n", "t", None, (), CacheSlide(), True), "secret")
    expect_stamp(params, "secret")
    expect_stamp({"cacheslide": {}}, "")
    for forged in ({}, {"cacheslide": {"stamp": "\ud800"}}, {"cacheslide": {"stamp": 1}}, params):
        with pytest.raises(RequestError, match="did not come through"):
            expect_stamp(forged, "another")
