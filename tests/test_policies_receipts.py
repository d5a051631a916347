"""Receipts of small hand-made plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cacheslide_agents.backend import Receipt
from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.store import MemoryStore
from cacheslide_agents.policies import CacheSlide, Plan
from cacheslide_agents.policies.cost import CostModel
from cacheslide_agents.policies.planner import dense_plan, make_plan
from cacheslide_agents.policies.receipts import build_receipt
from cacheslide_agents.selection import Fixed

KEY = ContextKey("model", "tenant", "task")
OLD = (
    Span("system", Role.REUSE, 0, 20, "s"),
    Span("memory", Role.RECOMPUTE, 20, 30, "m1"),
    Span("note", Role.REUSE, 30, 50, "n"),
    Span("document", Role.REUSE, 50, 100, "d"),
)
NEW = (
    Span("system", Role.REUSE, 0, 20, "s"),
    Span("memory", Role.RECOMPUTE, 20, 34, "m2"),
    Span("document", Role.REUSE, 34, 84, "d"),
    Span("cue", Role.RECOMPUTE, 84, 90, "c"),
)


@pytest.fixture
def plan() -> Plan:
    """`memory` grew by four tokens, `note` is gone, `cue` is new; two hits are corrected."""
    old = np.concatenate([np.arange(100, 120), np.arange(200, 210), np.arange(300, 370)])
    new = np.concatenate([np.arange(100, 120), np.arange(400, 414), np.arange(320, 370)])
    ids = np.concatenate([new, np.arange(500, 506)])
    store = MemoryStore(1 << 20)
    keys = torch.zeros(1, 100, 2)
    store.put(StoredContext(KEY, old, np.ones(100, dtype=np.bool_), OLD), [(keys, keys)])
    sizes = {"hidden": 64, "intermediate": 128, "heads": 2, "kv_heads": 1, "head_dim": 32}
    cost = CostModel.from_geometry(layers=4, **sizes)
    return make_plan(ids, NEW, KEY, None, CacheSlide(selector=Fixed((34, 35))), store, cost)


def receipt_of(plan: Plan) -> Receipt:
    active = np.flatnonzero(plan.active)
    return build_receipt(
        plan, request_id="r1", active=active, rows_per_layer=[len(active)] * 4, load_s=0.25
    )


def test_a_receipt_tells_every_chunk_its_fate(plan: Plan) -> None:
    told = {
        chunk.id: (chunk.outcome, chunk.tokens, chunk.shift, chunk.reused, chunk.corrected)
        for chunk in receipt_of(plan).chunks
    }
    assert told == {
        "system": ("hit", 20, 0, 20, 0),
        "memory": ("update", 14, None, 0, 0),
        "document": ("hit", 50, -16, 48, 2),
        "cue": ("update", 6, None, 0, 0),
        "note": ("vanished", 20, None, 0, 0),
    }


def test_a_receipt_gives_reasons_for_what_was_not_reused(plan: Plan) -> None:
    reasons = {chunk.id: chunk.reason for chunk in receipt_of(plan).chunks}
    assert reasons == {
        "system": "",
        "memory": "changed",
        "document": "",
        "cue": "new",
        "note": "removed",
    }


def test_a_receipt_counts_tokens_at_the_last_layer(plan: Plan) -> None:
    receipt = receipt_of(plan)
    assert receipt.request_id == "r1"
    assert receipt.policy == "cacheslide"
    assert receipt.outcome == "hit"
    assert receipt.prompt_tokens == 90
    assert receipt.reused_tokens == 20 + 48
    assert receipt.active_tokens == 14 + 2 + 6
    assert receipt.compute_fraction == 22 / 90
    assert receipt.exact is False
    assert receipt.load_s == 0.25


def test_rows_dropped_on_the_way_and_probes_count_in_the_compute_fraction(plan: Plan) -> None:
    probing = replace(plan, probe_layer_tokens=28)
    receipt = build_receipt(
        probing,
        request_id="r",
        active=np.flatnonzero(plan.active),
        rows_per_layer=[70, 70, 22, 22],
    )
    assert receipt.compute_fraction == (70 + 70 + 22 + 22 + 28) / (90 * 4)


def test_a_chunk_reused_in_part_is_aligned_and_has_the_shift_of_its_first_run(plan: Plan) -> None:
    merged = (NEW[0], Span("rest", Role.REUSE, 20, 90, "r"))
    (_, rest, _) = receipt_of(replace(plan, spans=merged)).chunks
    assert (rest.outcome, rest.shift, rest.reused, rest.corrected) == ("aligned", -16, 48, 2)


def test_a_dense_plan_has_an_exact_receipt_without_reuse() -> None:
    plan = dense_plan(
        np.arange(90), NEW, CacheSlide(), outcome="fallback", reason="PageError: torn"
    )
    receipt = receipt_of(plan)
    assert (receipt.outcome, receipt.reason) == ("fallback", "PageError: torn")
    assert (receipt.reused_tokens, receipt.active_tokens) == (0, 90)
    assert receipt.compute_fraction == 1.0
    assert receipt.exact is True
    assert {chunk.outcome for chunk in receipt.chunks} == {"update"}


def test_what_the_engines_prefix_cache_had_is_reused_not_cold() -> None:
    ids = np.arange(90)
    plan = dense_plan(ids, NEW, CacheSlide(), outcome="cold", reason="")
    rows = np.arange(60, 90)
    receipt = build_receipt(plan, request_id="r", active=rows, rows_per_layer=[30] * 4, prefix=60)
    assert (receipt.outcome, receipt.reason) == ("partial", "prefix_cache")
    assert (receipt.reused_tokens, receipt.active_tokens) == (60, 30)
    assert [(one.outcome, one.shift, one.reused) for one in receipt.chunks] == [
        ("hit", 0, 20),
        ("hit", 0, 14),
        ("aligned", 0, 26),
        ("update", None, 0),
    ]


def test_a_fallback_stays_one_whatever_the_prefix_cache_had() -> None:
    plan = dense_plan(np.arange(90), NEW, CacheSlide(), outcome="fallback", reason="trouble")
    receipt = build_receipt(
        plan, request_id="r", active=np.arange(60, 90), rows_per_layer=[30] * 4, prefix=60
    )
    assert (receipt.outcome, receipt.reason) == ("fallback", "trouble")
    assert receipt.reused_tokens + receipt.active_tokens == receipt.prompt_tokens
