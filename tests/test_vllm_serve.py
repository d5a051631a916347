"""`cacheslide serve` and stock vLLM as clients see them: reuse, receipts, streams, tenants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from cacheslide_agents.chunks import Role
from cacheslide_agents.errors import RequestError
from cacheslide_agents.prompt.wire_plan import (
    PLAN_VERSION,
    PlannedChunk,
    WirePlan,
    digest_of_ids,
)
from langchain_cacheslide import ChatCacheSlide
from langchain_cacheslide.question import Question
from langchain_cacheslide.remote import RemoteChat
from langchain_cacheslide.remote_receipt import NO_PLUGIN

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]

KEYS = ("key-of-a", "key-of-b")
SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "policy": "epic_context"}
"""A policy that never declines: tiny models are too fast for reuse to pay."""


@pytest.fixture(scope="module")
def urls(
    support: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Ours, with two API keys, and a stock one."""
    engines, servers = support("vllm_engines"), support("vllm_servers")
    if engines.MISSING:
        pytest.skip(engines.MISSING)
    folder = tmp_path_factory.mktemp("served")
    model = servers.chat_model(engines.tiny_model(), folder / "model")
    log, stock_log = folder / "ours.log", folder / "stock.log"
    flags = ("--store-gib=0.25", "--api-key", *KEYS)
    with (
        servers.serving(servers.OURS, model, log, *flags) as ours,
        servers.serving(servers.STOCK, model, stock_log) as stock,
    ):
        ours.await_health()
        stock.await_health()
        yield ours.url, stock.url


@pytest.fixture
def url(urls: tuple[str, str]) -> str:
    return urls[0]


@pytest.fixture
def text(request: pytest.FixtureRequest) -> Callable[[int], str]:
    """Text of so many characters, another in every test."""
    numbers = np.random.default_rng(list(request.node.name.encode()))
    return lambda count: "".join(numbers.choice(list("abcdefghij klmnop"), count))


def turns(text: Callable[[int], str]) -> tuple[list[BaseMessage], list[BaseMessage]]:
    """A prompt, and the same with a longer passage in its first fifth: what follows has moved."""
    head, tail = SystemMessage(text(150)), HumanMessage(text(600))
    return [head, HumanMessage(text(20)), tail], [head, HumanMessage(text(37)), tail]


def remote(url: str, key: str = KEYS[0]) -> RemoteChat:
    return RemoteChat(url, SecretStr(key))


def answer(chat: RemoteChat, messages: list[BaseMessage], **changes: Any) -> tuple[str, Any]:
    """The text and the receipt."""
    message = (
        chat.call(Question(messages, {**SETTINGS, **changes})).generate().generations[0].message
    )
    return str(message.content), message.response_metadata["cacheslide"]


def call(
    url: str, path: str, body: Any = None, key: str = KEYS[0], **headers: str
) -> httpx.Response:
    """One request by hand: GET without a body."""
    said = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    with httpx.Client(trust_env=False, timeout=120) as client:
        if body is None:
            return client.get(f"{url}/{path}", headers=said)
        return client.post(f"{url}/{path}", content=json.dumps(body), headers=said)


def receipt_of(url: str, answered: httpx.Response) -> Any:
    assert answered.status_code == 200, answered.text
    told = call(url, f"cacheslide/receipts/{answered.json()['id']}")
    assert told.status_code == 200, told.text
    return told.json()


def chat_body(url: str, plan: Any) -> dict[str, Any]:
    model = call(url, "models").json()["data"][0]["id"]
    return {
        "model": model,
        "messages": [{"role": "user", "content": "what moves?"}],
        "max_tokens": 2,
        "kv_transfer_params": {"cacheslide": plan},
    }


def test_a_first_turn_is_cold_and_a_moved_one_a_hit(url: str, text: Callable[[int], str]) -> None:
    first, second = turns(text)
    chat = ChatCacheSlide(base_url=url, api_key=SecretStr(KEYS[0]), **SETTINGS)
    cold = chat.invoke(first).response_metadata["cacheslide"]
    moved = chat.invoke(second).response_metadata["cacheslide"]
    assert (cold["outcome"], cold["reused_tokens"]) == ("cold", 0)
    assert moved["outcome"] == "partial"
    assert moved["prompt_tokens"] == cold["prompt_tokens"] + 17
    tail = next(chunk for chunk in moved["chunks"] if chunk["tokens"] > 600)
    assert tail["shift"] == 17
    assert tail["reused"] + tail["corrected"] == tail["tokens"]
    assert moved["reused_tokens"] > 600


def test_cold_dense_and_unchanged_turns_say_what_stock_vllm_says(
    urls: tuple[str, str], text: Callable[[int], str]
) -> None:
    messages, _ = turns(text)
    expected, _ = answer(remote(urls[1]), messages)
    cold, first = answer(remote(urls[0]), messages)
    again, second = answer(remote(urls[0]), messages)
    dense, third = answer(remote(urls[0]), messages, reuse=False)
    assert [cold, again, dense] == [expected] * 3
    assert [each["outcome"] for each in (first, second)] == ["cold", "hit"]
    assert third["reused_tokens"] == 0


def test_a_stream_ends_with_the_receipt(url: str, text: Callable[[int], str]) -> None:
    first, second = turns(text)
    whole, _ = answer(remote(url), first)
    pieces = list(remote(url).call(Question(first, SETTINGS)).stream())
    assert "".join(str(piece.message.content) for piece in pieces) == whole
    assert pieces[-1].message.response_metadata["cacheslide"]["outcome"] == "hit"
    moved = list(remote(url).call(Question(second, SETTINGS)).stream())[
        -1
    ].message.response_metadata["cacheslide"]
    assert (moved["outcome"], moved["reused_tokens"] > 600) == ("partial", True)


def test_a_server_without_the_plugin_says_that_reuse_is_off(
    urls: tuple[str, str], text: Callable[[int], str]
) -> None:
    _, receipt = answer(remote(urls[1]), turns(text)[0])
    assert receipt["outcome"] == "declined"
    assert receipt["reason"].startswith(NO_PLUGIN)


def test_the_status_needs_a_key_and_names_the_plans_that_are_read(url: str) -> None:
    assert call(url, "cacheslide/status", key="none").status_code == 401
    assert call(url, "cacheslide/status").json() == {"plan_versions": [PLAN_VERSION], "off": ""}


def test_tenants_share_neither_pages_nor_receipts(url: str, text: Callable[[int], str]) -> None:
    first, second = turns(text)
    _, mine = answer(remote(url), first)
    path = f"cacheslide/receipts/{mine['request_id']}"
    assert call(url, path).json()["outcome"] == "cold"
    assert call(url, path, key=KEYS[1]).status_code == 404
    assert call(url, path, key="none").status_code == 401
    _, theirs = answer(remote(url, KEYS[1]), second)
    assert theirs["outcome"] == "cold"
    _, again = answer(remote(url), second)
    assert again["outcome"] == "partial"


def test_tenants_with_the_same_request_id_have_a_receipt_each(url: str) -> None:
    for key, length in zip(KEYS, (40, 60), strict=True):
        ids = list(range(2, 2 + length))
        body = completion_body(url, ids, tokens_plan(ids))
        call(url, "completions", body, key, **{"X-Request-Id": "same"})
    found = [call(url, "cacheslide/receipts/cmpl-same", key=key).json() for key in KEYS]
    assert [each["prompt_tokens"] for each in found] == [40, 60]


def tokens_plan(ids: list[int], *, of: list[int] | None = None) -> dict[str, Any]:
    """One chunk of all `ids`, bound to them or to others."""
    chunk = PlannedChunk("all", Role.REUSE, len(ids))
    return WirePlan("tokens", digest_of_ids(of or ids), (chunk,), policy="epic_context").to_dict()


def completion_body(url: str, ids: list[int], plan: Any) -> dict[str, Any]:
    body = chat_body(url, plan)
    del body["messages"]
    return {**body, "prompt": ids}


def test_prompts_in_token_ids_are_reused_where_they_moved(
    url: str, support: Callable[[str], ModuleType]
) -> None:
    outcomes = []
    for ids in support("vllm_engines").turns(seed=5):
        answered = call(url, "completions", completion_body(url, ids, tokens_plan(ids)))
        outcomes.append(receipt_of(url, answered)["outcome"])
    assert outcomes == ["cold", "partial"]


def test_a_plan_for_other_ids_is_dropped(url: str) -> None:
    plan = tokens_plan(list(range(2, 200)), of=list(range(3, 201)))
    body = completion_body(url, list(range(2, 200)), plan)
    for _ in range(2):
        receipt = receipt_of(url, call(url, "completions", body))
        assert receipt["outcome"] == "declined"
        assert "other token ids" in receipt["reason"]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (WirePlan("characters", "0" * 32, ()).to_dict(), "for other messages"),
        ({"request_id": "x", "namespace": "of-b", "policy": {"type": "CacheSlide"}}, "version"),
        ("yes", "no JSON object"),
        (None, "no JSON object"),
        (
            {**WirePlan("tokens", "0" * 32, ()).to_dict(), "namespace": "\ud800"},
            "its namespace is not Unicode text",
        ),
        ({**WirePlan("tokens", "0" * 32, ()).to_dict(), "\ud800": 1}, r"unknown fields: \ud800"),
    ],
)
def test_a_plan_that_cannot_be_used_never_fails_the_request(
    url: str, plan: Any, reason: str
) -> None:
    receipt = receipt_of(url, call(url, "chat/completions", chat_body(url, plan)))
    assert receipt["outcome"] == "declined"
    assert receipt["reason"].startswith("plan dropped: ")
    assert reason in receipt["reason"]


def test_a_name_that_no_header_can_hold_costs_no_receipt(url: str) -> None:
    ids = list(range(2, 60))
    body = {**completion_body(url, ids, tokens_plan(ids)), "request_id": "ü→"}
    assert receipt_of(url, call(url, "completions", body))["prompt_tokens"] == 58


def test_a_plan_with_endless_chunks_is_dropped(url: str) -> None:
    plan = {**tokens_plan([2, 3]), "chunks": [[str(n), "reuse", 1] for n in range(50_000)]}
    receipt = receipt_of(url, call(url, "chat/completions", chat_body(url, plan)))
    assert "50000 chunks" in receipt["reason"]


def test_vllms_own_metrics_count_what_the_receipts_say(
    url: str, text: Callable[[int], str]
) -> None:
    before = metrics(url)
    receipts = [answer(remote(url), messages)[1] for messages in turns(text)]
    after = metrics(url)
    added = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert added["requests_total", "cold"] == added["requests_total", "partial"] == 1
    for kind in ("prompt", "reused", "active"):
        assert added["tokens_total", kind] == sum(each[f"{kind}_tokens"] for each in receipts)
    assert added["seconds_total", "compute"] > 0
    assert after["stored_bytes", "memory"] > before.get(("stored_bytes", "memory"), 0.0)


def metrics(url: str) -> dict[tuple[str, str], float]:
    """Our samples by name and our own label."""
    found = {}
    told = call(url.removesuffix("/v1"), "metrics").text
    for family in text_string_to_metric_families(told):
        for sample in family.samples:
            if sample.name.startswith("cacheslide_") and not sample.name.endswith("_created"):
                ours = set(sample.labels) & {"outcome", "kind", "phase", "tier"}
                label = "".join(sample.labels[name] for name in ours)
                found[sample.name.removeprefix("cacheslide_"), label] = sample.value
    return found


def test_what_is_wrong_with_a_body_vllm_says(url: str) -> None:
    answered = call(url, "chat/completions", {**chat_body(url, None), "max_tokens": "cacheslide"})
    assert answered.status_code == 400
    assert "max_tokens" in answered.text


@pytest.mark.parametrize("flag", ["--model", "--worker_cls=x", "--kv-transfer-config"])
def test_flags_that_serve_sets_are_refused(flag: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_cacheslide.serve import arguments

    with pytest.raises(RequestError, match="is set by `cacheslide serve` itself"):
        arguments("m", ["--port", "1", flag], {})


def test_a_server_with_a_store_folder_takes_time_to_write_it(
    lab: ModuleType, tmp_path: Path
) -> None:
    """Before what the user says, which then holds."""
    from vllm_cacheslide.serve import arguments

    model = str(lab.tiny_model())
    given = arguments(model, ["--shutdown-timeout", "5"], {"store_path": str(tmp_path)})
    assert values(given, "--shutdown-timeout") == ["60", "5"]
    assert "--shutdown-timeout" not in arguments(model, [], {})


def values(given: list[str], flag: str) -> list[str]:
    """In their order; the last one holds."""
    return [given[place + 1] for place, each in enumerate(given) if each == flag]


def test_calls_are_held_to_their_schemas_unless_the_user_gives_that_up(lab: ModuleType) -> None:
    from vllm_cacheslide.serve import arguments

    given = arguments(str(lab.tiny_model()), ["--tool-strict-level", "auto"], {})
    assert values(given, "--tool-strict-level") == ["parameter", "auto"]


@pytest.mark.parametrize(
    ("allowed", "expected"), [("", ["cacheslide"]), ("b,a", ["a", "b", "cacheslide"])]
)
def test_plugins_that_are_not_allowed_stay_out(allowed: str, expected: list[str]) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_cacheslide.serve import plugins

    assert plugins(allowed) == expected
    assert "cacheslide" in plugins(None)
