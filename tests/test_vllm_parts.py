"""Parts of the vLLM backend that hold no engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheslide_agents.errors import RequestError, ReuseError
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.policies import Recompute
from cacheslide_agents.policies.draft import dense_plan
from cacheslide_agents.policies.receipts import build_receipt
from vllm_cacheslide.directory import Directory
from vllm_cacheslide.receipts import Receipts
from vllm_cacheslide.rows import Job, batches
from vllm_cacheslide.settings import Settings

KEY = ContextKey("model", "tenant", "task")


def job(rows: list[int]) -> Job:
    plan = dense_plan(np.arange(100), (), Recompute(), outcome="cold", reason="cold")
    return Job("engine", "request", plan, (0,), np.array(rows, dtype=np.int64))


def context(seed: int, **changes: Any) -> StoredContext:
    ids = np.arange(seed, seed + 5)
    return StoredContext(**{"key": KEY, "ids": ids, "exact": np.ones(5, bool), **changes})


@given(
    st.lists(st.sets(st.integers(0, 60), max_size=30).map(sorted), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_batches_hold_every_row_once_in_order_and_no_more_than_they_may(
    rows: list[list[int]], most: int
) -> None:
    jobs = [job(each) for each in rows]
    made = list(batches(jobs, most))
    assert all(len(batch) <= most for batch in made)
    assert all(len(batch) == most for batch in made[:-1])
    for each in jobs:
        parts = [part for batch in made for owner, part in batch.parts if owner is each]
        assert np.array_equal(np.concatenate([*parts, each.rows[:0]]), each.rows)


@given(st.sets(st.integers(0, 60), min_size=1, max_size=40).map(sorted))
def test_runs_are_the_maximal_stretches_of_consecutive_rows(rows: list[int]) -> None:
    (batch,) = batches([job(rows)], 100)
    assert [row for run in batch.runs for row in range(run.start, run.stop)] == rows
    ends = [(run.start, run.stop) for run in batch.runs]
    assert all(stop < start for (_, stop), (start, _) in pairwise(ends))


def test_the_directory_finds_by_key_the_session_first_then_the_newest() -> None:
    directory = Directory()
    old, mine, new = context(1), context(2, session="me"), context(3)
    numbers = [directory.add(each) for each in (old, mine, new)]
    directory.add(context(4, key=ContextKey("model", "other", "task")))
    assert directory.find(KEY, "me") == [mine, new, old]
    assert directory.find(KEY) == [new, mine, old]
    directory.remove(numbers[2:])
    assert directory.find(KEY) == [mine, old]
    directory.remove(numbers[2:])


def test_the_directory_keeps_chunks_stored_alone_apart() -> None:
    directory = Directory()
    alone = context(1, isolated=True)
    directory.add(alone)
    assert directory.find(KEY) == []
    assert directory.find_isolated(KEY, alone.ids.copy()) is alone
    assert directory.find_isolated(KEY, alone.ids[:-1]) is None


def test_the_directory_has_no_keys_to_show() -> None:
    with pytest.raises(ReuseError, match="only tokens are"):
        Directory().load(context(1), 0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"store_byte": 1},
            "has store_byte; known: attention, disk_bytes, eviction, namespace_quota_bytes, "
            "policy, prefetch, profiles, receipts, store_bytes, store_path, tenant_header, "
            "tenant_quota_bytes, ttl_s",
        ),
        ({"disk_bytes": 0}, "disk_bytes=0"),
        ({"eviction": "fifo"}, "no eviction policy named 'fifo'"),
        ({"ttl_s": -1}, "ttl_s=-1"),
        ({"ttl_s": "60"}, "ttl_s='60'"),
        ({"ttl_s": float("inf")}, "ttl_s=inf"),
        ({"disk_bytes": True}, "disk_bytes=True"),
        ({"namespace_quota_bytes": 0}, "namespace_quota_bytes=0"),
        ({"tenant_quota_bytes": 0}, "tenant_quota_bytes=0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"store_path": 3}, "store_path=3"),
        ({"profiles": "folder"}, "profiles='folder'"),
        ({"store_bytes": 0}, "store_bytes=0"),
        ({"receipts": 1.5}, "receipts=1.5"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"policy": "flash"}, "no policy is named 'flash'"),
        ({"tenant_header": "X: y"}, "tenant_header='X: y'"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Settings.of(extra)


def test_receipts_are_bounded_and_totals_are_not() -> None:
    receipts = Receipts(most=2)
    plan = dense_plan(np.arange(10), (), Recompute(), outcome="cold", reason="cold")
    for name in ("a", "b", "c"):
        receipts.add(
            build_receipt(plan, request_id=name, active=np.arange(10), rows_per_layer=[10, 10])
        )
    assert receipts.of("a") is None
    assert receipts.of("c").request_id == "c"  # type: ignore[union-attr]
    assert receipts.totals()["requests"] == 3.0
    assert receipts.totals()["prompt_tokens"] == 30.0


def engine_config(**changes: Any) -> Any:
    """What `why_not` reads of vLLM's config, for an engine that can reuse."""
    text = SimpleNamespace(
        model_type="llama",
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_theta=10000.0,
    )
    text.to_dict = lambda: {name: value for name, value in vars(text).items() if name != "to_dict"}
    parts: dict[str, dict[str, Any]] = {
        "model_config": {"use_mla": False, "is_multimodal_model": False, "hf_text_config": text},
        "parallel_config": {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1},
        "cache_config": {"cache_dtype": "auto"},
        "lora_config": None,  # type: ignore[dict-item]
        "speculative_config": None,  # type: ignore[dict-item]
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if section == "text":
            setattr(text, field, value)
        elif field:
            parts[section][field] = value
        else:
            parts[section] = value
    return SimpleNamespace(
        **{
            name: SimpleNamespace(**part) if isinstance(part, dict) else part
            for name, part in parts.items()
        }
    )


@pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"model_config__use_mla": True}, "latent attention"),
        ({"model_config__is_multimodal_model": True}, "multimodal"),
        ({"text__sliding_window": 4096}, "sliding window"),
        ({"text__sliding_window": 4096, "text__use_sliding_window": False}, ""),
        ({"text__layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"text__model_type": "gemma2"}, "'gemma2'"),
        ({"text__model_type": "cope_llama"}, ""),
    ],
)
def test_an_engine_that_cannot_reuse_is_told_apart_by_its_config(
    support: Callable[[str], ModuleType], changes: dict[str, Any], reason: str
) -> None:
    missing = support("vllm_engines").MISSING
    if missing:
        pytest.skip(missing)
    from vllm_cacheslide.support import why_not

    found = why_not(engine_config(**changes))
    assert (reason in found) if reason else not found


@pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import
def test_counters_of_a_second_engine_in_a_process_replace_those_of_the_first(
    support: Callable[[str], ModuleType],
) -> None:
    missing = support("vllm_engines").MISSING
    if missing:
        pytest.skip(missing)
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from vllm_cacheslide.metrics import PrometheusMetrics

    kinds = {kind: kind for kind in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    for tokens in (5, 3):
        metrics = PrometheusMetrics(config, kinds, ["model"], {0: ["m"]})
        metrics.observe(
            {"tokens:reused": tokens, "stored_bytes:ssd": tokens, "store_bytes:ssd:read": tokens}
        )
    labels = {"model": "m"}
    on_ssd = {**labels, "tier": "ssd"}
    assert REGISTRY.get_sample_value("cacheslide_stored_bytes", on_ssd) == 3
    read = {**on_ssd, "direction": "read"}
    assert REGISTRY.get_sample_value("cacheslide_store_bytes_total", read) == 3
    told = REGISTRY.get_sample_value("cacheslide_tokens_total", {**labels, "kind": "reused"})
    assert told == 3
