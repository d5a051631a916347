"""What whoever runs a server counts on: contexts that outlive it, tenants that cannot crowd one
another out, nothing that is left of requests that are over.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
import torch

from cacheslide_agents.backend import GenerationRequest
from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext
from cacheslide_agents.pages.slide import SlideStore
from cacheslide_agents.policies import CacheSlide, Recompute
from cacheslide_agents.policies.planner import dense_plan
from cacheslide_agents.policies.receipts import build_receipt
from cacheslide_agents.prompt.wire_plan import PlannedChunk, WirePlan, digest_of_ids
from vllm_cacheslide.receipts import Receipts
from vllm_cacheslide.settings import Settings
from vllm_cacheslide.storage import Rank, open_store

ALONE = Rank(0, 0, 1)
BLOCK_BYTES = 2 * 2 * 1 * 16 * 8 * 4
"""Of two layers, keys and values, with one head of 8 numbers in float32."""

KEYS = ("key-of-a", "key-of-b")
MIB = 1 / 1024
"""In GiB."""
ENDING_S = 120

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]


def put(store: SlideStore, namespace: str, seed: int, tokens: int = 64) -> StoredContext | None:
    """`None` if it was refused."""
    ids = np.arange(seed * 1000, seed * 1000 + tokens)
    context = StoredContext(ContextKey("model", namespace, "task"), ids, np.ones(tokens, bool))
    numbers = torch.Generator().manual_seed(seed)
    made = torch.randn((2, 2, 1, tokens, 8), generator=numbers)
    layers: list[LayerKV] = [(keys, values) for keys, values in made]
    return context if store.put(context, layers) else None


@pytest.mark.parametrize("tokens", [1, 60, 64])
@pytest.mark.parametrize("on_ssd", [False, True])
@pytest.mark.parametrize(("quota", "left"), [(12, 3), (None, 0)])
def test_a_flood_in_many_namespaces_pushes_out_other_tenants_only_without_a_quota(
    quota: int | None, left: int, on_ssd: bool, tokens: int, tmp_path: Path
) -> None:
    """Room for 32 blocks in memory and 40 on SSD; tenant `a` has 12."""
    settings = Settings(
        store_bytes=32 * BLOCK_BYTES,
        store_path=str(tmp_path) if on_ssd else None,
        disk_bytes=40 * BLOCK_BYTES,
        tenant_quota_bytes=None if quota is None else quota * BLOCK_BYTES,
    )
    with open_store(settings, ALONE) as store:
        mine = [put(store, f"a/{number % 2}", number) for number in range(3)]
        for number in range(10, 210):
            assert put(store, f"b/{number}", number, tokens)
        found = store.contexts()
        assert sum(each in found for each in mine) == left
        theirs = [each for each in found if each.key.tenant == "b"]
        assert sum(-(-len(each) // 16) for each in theirs) <= (quota or 80)
        assert max(int(each.ids[0]) for each in theirs) == 209_000


def test_what_a_tenant_gives_up_on_ssd_costs_no_other_tenant_a_context(tmp_path: Path) -> None:
    """Files that both wrote to are half dead when one of them has gone on."""
    settings = Settings(
        store_bytes=8 * BLOCK_BYTES,
        store_path=str(tmp_path),
        disk_bytes=56 * BLOCK_BYTES,
        tenant_quota_bytes=12 * BLOCK_BYTES,
    )
    with open_store(settings, ALONE) as store:
        mine = []
        for number in range(12):
            mine.append(put(store, f"a/{number}", number, 16))
            for other in range(3):
                assert put(store, "b/x", 100 + 3 * number + other, 16)
        for number in range(1000, 1100):
            assert put(store, "b/x", number, 16)
        found = store.contexts()
        assert all(each in found for each in mine)
        assert len(found) == 24


def test_a_context_that_its_tenant_may_not_keep_is_refused_and_drives_out_none(
    tmp_path: Path,
) -> None:
    settings = Settings(store_bytes=1 << 20, tenant_quota_bytes=4 * BLOCK_BYTES)
    with open_store(settings, ALONE) as store:
        kept = [put(store, "a/1", 1, 32), put(store, "a/2", 2, 32)]
        assert put(store, "a/3", 3, 65) is None
        assert store.contexts() == kept
        assert put(store, "b", 4, 64) is not None
        assert put(store, "a", 5, 17) is not None
        assert [each in store.contexts() for each in kept] == [False, True]


def test_receipts_of_very_many_chunks_are_forgotten_earlier() -> None:
    """What is remembered is bounded in chunks too: 64 for each of `most`."""
    receipts = Receipts(most=4)
    ids, policy = np.arange(200), Recompute()
    for number, parts in enumerate((1, 200, 100, 1, 2)):
        spans = [Span(f"{at}", Role.REUSE, at, at + 1, "") for at in range(parts - 1)]
        spans.append(Span("last", Role.REUSE, parts - 1, len(ids), ""))
        plan = dense_plan(ids, spans, policy, outcome="cold", reason="cold")
        name, rows = str(number), [len(ids)]
        receipts.add(build_receipt(plan, request_id=name, active=ids, rows_per_layer=rows))
    assert [receipts.of(str(number)) is not None for number in range(5)] == [False] * 2 + [True] * 3


@pytest.fixture
def inside(support: Callable[[str], ModuleType]) -> Any:
    """The shared engine of this process."""
    lab = support("vllm_engines")
    if lab.MISSING:
        pytest.skip(lab.MISSING)
    return lab.engine("inside")


HELD = ("Planned", "Plan", "Annotation", "Job", "Load", "Prefill", "Keep", "Note", "StoredContext")
"""What is made anew for every request."""


def held() -> Counter[str]:
    gc.collect()
    ours = [type(each) for each in gc.get_objects()]
    return Counter(
        each.__name__
        for each in ours
        if each.__name__ in HELD and each.__module__.startswith(("vllm_cache", "cacheslide_"))
    )


async def leave(backend: Any, request: GenerationRequest, tokens: int) -> None:
    """Take `tokens` of the answer and go; with none, before the first one is there."""
    pieces = backend.agenerate(request)
    async with aclosing(pieces):
        if not tokens:
            with suppress(TimeoutError):
                await asyncio.wait_for(anext(pieces), 0.01)
            return
        async for _ in pieces:
            tokens -= 1
            if not tokens:
                return


async def crowd(backend: Any, lab: ModuleType, namespace: str, count: int = 36) -> None:
    """`count` requests of 6 sessions, 12 at once; every third is left early."""
    places = asyncio.Semaphore(12)

    async def one(number: int) -> None:
        ids = lab.turns(number % 6, 300)[number // 6 % 2]
        reuse = CacheSlide(may_decline=False)
        asked = lab.request(ids, reuse, namespace=f"{namespace}-{number % 6}", retain=True)
        async with places:
            await leave(backend, asked, 99 if number % 3 else number % 4)

    await asyncio.gather(*(one(number) for number in range(count)))


def test_nothing_is_held_of_requests_that_are_over(
    inside: Any, support: Callable[[str], ModuleType]
) -> None:
    """Some ended, some were aborted; what stays is in the store, once."""
    lab = support("vllm_engines")
    counts = []
    for _ in range(2):
        before = inside.metrics().get("requests", 0)
        asyncio.run(crowd(inside, lab, uuid4().hex))
        inside.forget_prefixes()  # raises if blocks are still in use
        assert inside.metrics()["requests"] - before > 24
        lab.working(inside).store.clear()
        ids, reuse = list(range(2, 60)), CacheSlide(may_decline=False)
        # when it is stored, the workers look what has left the store
        lab.ask(inside, lab.request(ids, reuse, namespace="last", retain=True))
        lab.settle(inside)
        counts.append(held())
        scheduling, working = lab.scheduling(inside), lab.working(inside)
        directory = scheduling._planning.directory
        assert not scheduling._planned
        assert not working._fallen
        assert not inside._thread._sinks
        assert len(directory._contexts) == len(working._contexts) == len(working.store.contexts())
        assert len(directory._contexts) == len(directory._named) == 1
    assert counts[1] <= counts[0]
    assert [counts[1][name] for name in ("Planned", "Job", "Load")] == [0, 0, 0]


def test_a_context_that_the_workers_lack_is_planned_on_once(
    inside: Any, support: Callable[[str], ModuleType]
) -> None:
    lab = support("vllm_engines")
    namespace, reuse = uuid4().hex, CacheSlide(may_decline=False)
    first, moved = lab.turns(seed=70)
    lab.ask(inside, lab.request(first, reuse, namespace=namespace, retain=True))
    lab.settle(inside)
    known = lab.working(inside)._contexts
    for number in [n for n, each in known.items() if each.key.namespace == namespace]:
        del known[number]
    answers = [lab.ask(inside, lab.request(moved, reuse, namespace=namespace)) for _ in range(2)]
    told = [(each.receipt.outcome, each.receipt.reason) for each in answers]
    assert told[0][0] == "fallback"
    assert told[1] == ("partial", "prefix_cache")  # no context; vLLM itself had the first tokens
    again = answers[1].receipt
    assert again.reused_tokens + again.active_tokens == again.prompt_tokens


def asked(url: str, ids: list[int], key: str, namespace: str = "default") -> Any:
    """The receipt of one completion."""
    chunk = PlannedChunk("all", Role.REUSE, len(ids))
    plan = WirePlan(
        "tokens", digest_of_ids(ids), (chunk,), namespace=namespace, policy="epic_context"
    )
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(trust_env=False, timeout=120, headers=headers) as client:
        model = client.get(f"{url}/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": 8,
            "temperature": 0.0,
            "ignore_eos": True,
            "kv_transfer_params": {"cacheslide": plan.to_dict()},
        }
        answered = client.post(f"{url}/completions", json=body)
        assert answered.status_code == 200, answered.text
        return client.get(f"{url}/cacheslide/receipts/{answered.json()['id']}").json()


def on_ssd(folder: Path) -> list[list[int]]:
    """Tokens of what is found there when nobody serves."""
    with SlideStore(1 << 20, folder, read_only=True) as store:
        return [each.ids.tolist() for each in store.contexts()]


def test_after_sigterm_the_next_server_reuses_what_was_written(
    support: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """Once to the server's process alone, once to all of its processes, as systemd does."""
    engines, servers = support("vllm_engines"), support("vllm_servers")
    if engines.MISSING:
        pytest.skip(engines.MISSING)
    model = servers.chat_model(engines.tiny_model(), tmp_path / "model")
    store, logs = tmp_path / "store", (tmp_path / "first.log", tmp_path / "second.log")
    sizes = (f"--store-gib={8 * MIB}", f"--disk-gib={32 * MIB}", f"--tenant-gib={4 * MIB}")
    flags = (f"--store-path={store}", *sizes, "--api-key", *KEYS)
    (first, moved), (theirs, _) = engines.turns(seed=5), engines.turns(seed=6)
    with servers.serving(servers.OURS, model, logs[0], *flags) as server:
        server.await_health()
        assert asked(server.url, theirs, KEYS[1])["outcome"] == "cold"
        assert asked(server.url, first, KEYS[0])["outcome"] == "cold"
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(ENDING_S)
    assert [ids[: len(first)] for ids in on_ssd(store)] == [theirs, first]
    assert [len(ids) for ids in on_ssd(store)] == [len(first) + 7] * 2
    with servers.serving(servers.OURS, model, logs[1], *flags) as server:
        server.await_health()
        for seed in range(30):
            asked(server.url, engines.turns(seed=100 + seed)[0], KEYS[1], f"flood-{seed}")
        reused = asked(server.url, moved, KEYS[0])
        assert (reused["outcome"], reused["reused_tokens"] > 500) == ("partial", True)
        assert asked(server.url, theirs, KEYS[1])["outcome"] == "cold"
        os.killpg(server.process.pid, signal.SIGTERM)
        server.process.wait(ENDING_S)
    assert moved in [ids[: len(moved)] for ids in on_ssd(store)]
