"""One rank's page store on vLLM, without an engine: folders, keys, what is found again, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.errors import RequestError, StoreError
from cacheslide_agents.pages.base import ContextKey, LayerKV, StoredContext
from cacheslide_agents.pages.slide import SlideStore
from cacheslide_agents.policies import CacheSlide
from cacheslide_agents.policies.draft import dense_plan
from vllm_cacheslide.directory import Directory
from vllm_cacheslide.settings import Settings
from vllm_cacheslide.storage import Rank, StoreNews, check_folder, open_store

KEY = ContextKey("model", "tenant", "task")
ALONE = Rank(0, 0, 1)
PAIR = (Rank(0, 0, 2), Rank(1, 1, 2))

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.of({"store_path": str(tmp_path), "store_bytes": 1 << 20})


@pytest.fixture
def restoring(support: Callable[[str], ModuleType]) -> Any:
    missing = support("vllm_engines").MISSING
    if missing:
        pytest.skip(missing)
    from vllm_cacheslide import restoring

    return restoring


def context(seed: int, key: ContextKey = KEY, **changes: Any) -> StoredContext:
    ids = np.arange(seed, seed + 40)
    return StoredContext(**{"key": key, "ids": ids, "exact": np.ones(40, bool), **changes})


def layers(tokens: int = 40) -> list[LayerKV]:
    numbers = torch.Generator().manual_seed(0)
    made = torch.randn((2, 2, 1, tokens, 8), generator=numbers)
    return [(keys, values) for keys, values in made]


def kept(store: SlideStore, *contexts: StoredContext) -> None:
    for each in contexts:
        assert store.put(each, layers())


def test_every_rank_stores_in_its_folder_under_its_key(settings: Settings, tmp_path: Path) -> None:
    for rank in PAIR:
        with open_store(settings, rank) as store:
            kept(store, context(0, rank.own(KEY)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    keys = {rank.own(KEY) for rank in (ALONE, *PAIR)}
    assert len(keys) == 3
    assert ALONE.own(KEY) == KEY


def test_a_key_is_common_again_only_to_the_rank_whose_it_is() -> None:
    first, second = PAIR
    assert first.common(first.own(KEY)) == KEY
    assert second.common(first.own(KEY)) is None
    assert first.common(KEY) is None


def test_workers_of_data_parallel_replicas_are_counted_through() -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_index=3)
    )
    assert Rank.of(config, 1) == Rank(7, 1, 2)


def test_a_folder_in_use_is_refused_before_a_model_is_loaded(settings: Settings) -> None:
    check_folder(settings)
    with open_store(settings, ALONE):
        with pytest.raises(StoreError, match="is being written by process"):
            check_folder(settings)
        with pytest.raises(StoreError, match="is being written by process"):
            open_store(settings, ALONE)
    check_folder(settings)


def test_a_folder_of_nobody_is_bad_input() -> None:
    with pytest.raises(RequestError, match=r"store_path='~nobody-here/x' is no path"):
        check_folder(Settings(store_path="~nobody-here/x"))


def test_of_a_session_ssd_keeps_one_context_and_memory_four(settings: Settings) -> None:
    for chosen, count in ((settings, 1), (Settings(store_bytes=1 << 20), 4)):
        with open_store(chosen, ALONE) as store:
            kept(store, *(context(seed, session="me") for seed in range(6)))
            assert len(store.contexts()) == count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have gone by, as the store sees them."""
    passed = [0.0]
    monkeypatch.setattr("cacheslide_agents.pages.holdings.monotonic", lambda: 1000 + passed[0])
    monkeypatch.setattr("cacheslide_agents.pages.holdings.time", lambda: 5000 + passed[0])
    return passed


def test_the_scheduler_is_told_what_idle_time_took(
    settings: Settings, restoring: Any, clock: list[float]
) -> None:
    from vllm_cacheslide.orders import Keep, Note, Order, StepOrders
    from vllm_cacheslide.receipts import Receipts
    from vllm_cacheslide.working import Working

    plan: Any = SimpleNamespace()
    with open_store(replace(settings, ttl_s=60), ALONE) as store:
        keeping: Any = SimpleNamespace(keep=lambda order, *_: store.put(order.context, layers()))
        restored = restoring.Restored(store, ALONE, "model")
        side = Working(store, plan, keeping, Receipts(9), restored, ALONE, 2, ages=True)
        keep = Keep(Order("engine", "request", plan, ()), 7, context(0), ())
        assert not side.carry_out(StepOrders(keeps=(keep,)))
        assert not side.take_results().lost
        clock[0] = 61
        sibling = Note(Order("next", "next", plan, (), sibling=True), 0)
        assert not side.carry_out(StepOrders(notes=(sibling,)))
        assert side.take_results().lost == {7}
        assert store.counts()["expired"] == 1


def test_what_is_computed_on_approximate_blocks_is_not_exact(
    settings: Settings, restoring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reuse that was preempted comes back to blocks of its own, and then loses its source."""
    from vllm_cacheslide import working
    from vllm_cacheslide.orders import Keep, Order, Prefill, StepOrders
    from vllm_cacheslide.receipts import Receipts

    monkeypatch.setattr(working, "agree", lambda jobs: None)
    done: list[Any] = []
    ids = np.arange(30)
    for engine_id, approximate_from, start in (("own", 12, 16), ("exact", 12, 12), ("new", 0, 0)):
        plan = dense_plan(ids, (), CacheSlide(), outcome="hit", reason="")
        plan = replace(plan, exact=np.arange(30) < approximate_from)
        ordered = Prefill(Order(engine_id, engine_id, plan, (99,)), (0, 1), start)
        keep = Keep(Order(engine_id, engine_id, plan, ()), 7, context(0), ())
        with open_store(settings, ALONE) as store:
            prefill: Any = SimpleNamespace(run=lambda jobs, store: None)
            keeping: Any = SimpleNamespace(keep=lambda order, *_: done.append(order.context))
            receipts = Receipts(9)
            restored = restoring.Restored(store, ALONE, "model")
            side = working.Working(store, prefill, keeping, receipts, restored, ALONE, 2)
            side.carry_out(StepOrders(prefills=(ordered,)))
            side.carry_out(StepOrders(keeps=(keep,), ended=(engine_id,)))
            receipt = receipts.of(engine_id)
            assert receipt is not None and receipt.outcome == "fallback"
            assert receipt.exact is (engine_id != "own")
    own, exact, new = (kept.exact.tolist() for kept in done)
    assert own == [True] * 12 + [False] * 28
    assert exact == new == [True] * 40


def test_what_is_too_old_is_not_found_again(
    settings: Settings, restoring: Any, clock: list[float]
) -> None:
    aging = replace(settings, ttl_s=60)
    with open_store(aging, ALONE) as store:
        kept(store, context(0, created=5000.0), context(100, created=5030.0))
    clock[0] = 70
    with open_store(aging, ALONE) as store:
        found = restoring.Restored(store, ALONE, "model").found().contexts
    assert [each.created for each in found.values()] == [5030.0]


def test_a_context_is_planned_on_again_if_its_successor_is_not_stored() -> None:
    directory = Directory(one_per_session=True)
    first, second, third = (context(seed, session="me") for seed in range(3))
    numbers = [directory.add(each) for each in (first, second)]
    assert not directory.has(numbers[:1]) and directory.has(numbers[1:])
    directory.remove(numbers[1:])
    assert directory.find(KEY) == [first] and directory.has(numbers[:1])
    numbers.append(directory.add(third))
    directory.remove(numbers[:1])
    assert directory.find(KEY) == [third] and not directory.has(numbers[:1])


def test_the_directory_does_not_plan_on_what_will_be_superseded() -> None:
    directory = Directory(one_per_session=True)
    others = [context(1, session="you"), context(2), context(3, replace(KEY, task="x"))]
    others += [context(4, session="me", isolated=True)]
    for each in (*others[:1], context(0, session="me"), *others[1:]):
        directory.add(each)
    latest = context(5, session="me")
    directory.add(latest)
    assert directory.find(KEY, "me") == [latest, others[1], others[0]]
    assert directory.find_isolated(KEY, others[3].ids) is others[3]


def test_what_every_rank_has_is_found_and_the_rest_is_dropped(
    settings: Settings, restoring: Any
) -> None:
    """Of five contexts the first rank has lost one, the second another; one is of another model."""
    both = [context(seed, session=None if seed else "me") for seed in range(2)]
    lost = [context(2), context(3)]
    foreign = context(4, replace(KEY, fingerprint="other"))
    for rank, own in zip(PAIR, lost, strict=True):
        with open_store(settings, rank) as store:
            kept(store, *(replace(each, key=rank.own(each.key)) for each in (*both, own, foreign)))
    stores = [open_store(settings, rank) for rank in PAIR]
    restored = [
        restoring.Restored(store, rank, "model") for store, rank in zip(stores, PAIR, strict=True)
    ]
    found = restoring.held_by_all([each.found() for each in restored], 2)
    assert restoring.held_by_all([restored[0].found()], 2) == {}, "the other rank said nothing"
    assert [(each.key, each.session, each.ids.tolist()) for each in found.values()] == [
        (each.key, each.session, each.ids.tolist()) for each in both
    ]
    numbers = {name: number for number, name in enumerate(found, 1)}
    for store, rank, each in zip(stores, PAIR, restored, strict=True):
        mine = each.take(numbers)
        assert [mine[number].ids[0] for number in (1, 2)] == [0, 1]
        assert {held.key for held in mine.values()} == {rank.own(KEY)}
        assert {int(held.ids[0]) for held in store.contexts()} == {0, 1, 4}
        assert each.take({}) == {}
        store.close()


def test_an_index_that_cannot_be_written_fails_no_request(
    settings: Settings, restoring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_cacheslide import working
    from vllm_cacheslide.orders import Order, Prefill
    from vllm_cacheslide.receipts import Receipts

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with open_store(settings, ALONE) as store:
        kept(store, context(0), context(1), context(2))
    with open_store(settings, ALONE) as store, monkeypatch.context() as patched:
        patched.setattr("cacheslide_agents.pages.index.Index.commit", full)
        restored = restoring.Restored(store, ALONE, "model")
        numbers = {name: number for number, name in enumerate(list(restored.found().contexts)[1:])}
        idle: Any = SimpleNamespace()
        side = working.Working(store, idle, idle, Receipts(9), restored, ALONE, 2)
        side._contexts = restored.take(numbers)
        assert [int(held.ids[0]) for held in side._contexts.values()] == [1, 2]
        plan = dense_plan(
            np.arange(3), (), CacheSlide(), outcome="fallback", reason="NonFiniteError: nan"
        )
        prefill = Prefill(Order("e", "r", plan, (0,)), (), 0)
        side._drop_sources({side._dense_job(prefill, plan.reason): prefill})
        assert [int(held.ids[0]) for held in store.contexts()] == [2]
        assert side.take_results().lost == {0}


def test_answers_that_share_blocks_fail_together(restoring: Any) -> None:
    from vllm_cacheslide.agreement import fail_together
    from vllm_cacheslide.rows import Job

    plan = dense_plan(np.arange(9), (), CacheSlide(), outcome="hit", reason="")
    rows = np.arange(8)
    keeper, sibling, other = (
        Job(name, name, plan, blocks, rows, 0)
        for name, blocks in (("a", (3, 4)), ("b", (3, 5)), ("c", (6, 7)))
    )
    keeper.fail(OSError("torn"))
    fail_together([keeper, sibling, other])
    assert "torn" in sibling.trouble and "shares blocks" in sibling.trouble
    assert not other.trouble


def test_an_engine_of_another_size_finds_nothing(settings: Settings, restoring: Any) -> None:
    with open_store(settings, ALONE) as store:
        kept(store, context(0))
    with open_store(settings, PAIR[0]) as store:
        assert not restoring.Restored(store, PAIR[0], "model").found().contexts


def test_only_the_first_rank_sends_what_is_in_a_context(settings: Settings, restoring: Any) -> None:
    with open_store(settings, PAIR[1]) as store:
        kept(store, context(0, PAIR[1].own(KEY)))
        told = restoring.Restored(store, PAIR[1], "model").found().contexts
    assert list(told.values()) == [None]
    assert restoring.held_by_all([], 1) == {}


def test_contexts_that_came_one_after_the_other_have_names_of_their_own(restoring: Any) -> None:
    one = context(0, created=1.0)
    same = context(0, created=1.0)
    others = [
        context(0, created=2.0),
        context(1, created=1.0),
        context(0, created=1.0, exact=np.zeros(40, bool)),
        context(0, replace(KEY, namespace="\udcff"), created=1.0),
    ]
    name = restoring.name_of
    assert name(one) == name(same)
    assert len({name(each) for each in (one, *others)}) == 5


def test_news_of_a_store_add_up_to_what_it_counted(settings: Settings, tmp_path: Path) -> None:
    """Memory for one context of three blocks: the first must leave for the second."""
    block = 2 * 2 * 16 * 8 * 4
    tight = replace(settings, store_bytes=3 * block)
    with open_store(tight, ALONE) as store:
        news = StoreNews(store)
        first, second = context(0), context(100)
        total: dict[str, float] = {}
        for each in (first, second):
            kept(store, each)
            for name, value in news.take().items():
                total[name] = total.get(name, 0.0) + value
        store.load(first, 0)
        told = news.take()
        counted = store.metrics()
        assert told["store_bytes:ssd:read"] == counted["ssd_read_bytes"] > 0
        assert (
            total["store_bytes:ssd:write"] + told.get("store_bytes:ssd:write", 0.0)
            == (counted["ssd_write_bytes"])
        )
        assert total["store_bytes:memory:write"] == counted["memory_write_bytes"]
        assert told["stored_bytes:ssd"] > 0
        assert "misses:torn" not in told
        store.flush()
        files = tmp_path.glob("rank-0/extents/*.pages")
        assert news.take()["stored_bytes:ssd"] == sum(file.stat().st_size for file in files)
        store.clear()
        assert news.take()["stored_bytes:ssd"] == 0
    with open_store(tight, ALONE) as store:
        assert store.counts()["ssd_bytes"] == 0
