"""A page store in memory: what it keeps, what it lets go, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.errors import PageError, RequestError, StoreError
from cacheslide_agents.pages import ContextKey, MemoryStore, ReusedRun, SlideStore, StoredContext


@pytest.fixture(scope="module")
def world(support: Callable[[str], ModuleType]) -> Any:
    return support("page_world")


@pytest.fixture
def put(world: Any) -> Callable[..., StoredContext]:
    def put(store: SlideStore, ids: Any, session: str | None = None, **how: Any) -> StoredContext:
        context: StoredContext = world.context_of(ids, session, **how)
        assert store.put(context, world.layers_of(len(context)))
        return context

    return put


def store_of(blocks: int, world: Any, **limits: Any) -> SlideStore:
    return SlideStore(blocks * world.BLOCK_BYTES, **limits)


def kept(store: SlideStore, *contexts: StoredContext) -> list[bool]:
    """Whether each context is stored; touches nothing."""
    present = {id(context) for context in store.contexts()}
    return [id(context) in present for context in contexts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50])
def test_what_was_put_is_loaded_layer_by_layer(tokens: int, dtype: torch.dtype, world: Any) -> None:
    store = SlideStore(1 << 20)
    layers = [(k.to(dtype), v.to(dtype)) for k, v in world.layers_of(tokens)]
    context = world.context_of(range(tokens))
    assert store.put(context, layers)
    for layer, (keys, values) in enumerate(layers):
        got_keys, got_values = store.load(context, layer)
        assert torch.equal(got_keys, keys) and torch.equal(got_values, values)


def test_ranges_are_loaded_one_after_the_other(world: Any) -> None:
    store = SlideStore(1 << 20)
    context, layers = world.context_of(range(60)), world.layers_of(60)
    store.put(context, layers)
    for ranges in ([(3, 20), (40, 41)], [(40, 60), (0, 17)], [(5, 5)], []):
        keys, values = store.load(context, 1, ranges)
        tokens = [token for start, stop in ranges for token in range(start, stop)]
        assert torch.equal(keys, layers[1][0][:, tokens])
        assert torch.equal(values, layers[1][1][:, tokens])
    for wrong in ((-1, 3), (3, 61), (9, 3)):
        with pytest.raises(PageError, match=f"tokens {wrong[0]} to {wrong[1]} are not in"):
            store.load(context, 1, [wrong])


def test_views_and_tensors_that_need_gradients_can_be_put(world: Any) -> None:
    store = SlideStore(1 << 20)
    arena = torch.randn(2, 2, 100, 4, requires_grad=True)
    context = world.context_of([1, 2, 3])
    with torch.inference_mode():
        assert store.put(context, [(arena[0, :, 5:8], arena[1, :, 5:8])])
    keys, values = store.load(context, 0)
    assert torch.equal(keys, arena[0, :, 5:8]) and torch.equal(values, arena[1, :, 5:8])
    assert not keys.requires_grad


def test_memory_is_counted_by_blocks_of_sixteen_tokens(put: Any, world: Any) -> None:
    store = store_of(20, world)
    for length in (1, 16, 17, 40):
        put(store, range(length))
    metrics = store.metrics()
    assert metrics["memory_bytes"] == (1 + 1 + 2 + 3) * world.BLOCK_BYTES
    assert metrics["pages"] == (1 + 1 + 2 + 3) * world.LAYERS
    assert metrics["contexts"] == 4
    assert metrics["memory_budget_bytes"] == 20 * world.BLOCK_BYTES


def test_residuals_are_stored_counted_and_optional(world: Any) -> None:
    store = SlideStore(1 << 20)
    context = world.context_of([1, 2, 3])
    checkpoint = torch.randn(10, 8)[2:5]
    assert store.put(context, world.layers_of(3), {3: checkpoint})
    stored = store.residual(context, 3)
    assert stored is not None and torch.equal(stored, checkpoint)
    assert stored.untyped_storage().nbytes() == 3 * 8 * 4
    assert store.residual(context, 0) is None
    assert store.residual(world.context_of([1, 2, 3]), 3) is None
    assert store.metrics()["memory_bytes"] == world.BLOCK_BYTES + 3 * 8 * 4
    store.clear()
    assert store.metrics()["memory_bytes"] == 0


def test_find_gives_the_session_first_then_the_newest_of_the_same_key(put: Any, world: Any) -> None:
    store = MemoryStore(1 << 20)
    a1, b1 = put(store, [1], "a"), put(store, [2], "b")
    a2, b2 = put(store, [3], "a"), put(store, [4], "b")
    put(store, [5], "a", key=ContextKey("model", "other tenant", "task"))
    put(store, [6], "a", isolated=True)
    assert store.find(world.KEY) == [b2, a2, b1, a1]
    assert store.find(world.KEY, "a") == [a2, a1, b2, b1]
    assert store.find(world.KEY, "unheard of") == [b2, a2, b1, a1]
    assert store.find(ContextKey("other model", "default", "task")) == []


def test_find_isolated_wants_the_exact_tokens_of_a_chunk_computed_alone(
    put: Any, world: Any
) -> None:
    store = SlideStore(1 << 20)
    put(store, [1, 2, 3])
    chunk = put(store, [1, 2], isolated=True)
    assert store.find_isolated(world.KEY, np.array([1, 2])) is chunk
    assert store.find_isolated(world.KEY, np.array([1, 2], dtype=np.int32)) is chunk
    assert store.find_isolated(world.KEY, np.array([1, 2, 3])) is None
    assert store.find_isolated(ContextKey("model", "default", "else"), np.array([1, 2])) is None


def test_the_least_recently_used_context_makes_room(put: Any, world: Any) -> None:
    store = store_of(3, world)
    first, second, third = (put(store, [at]) for at in range(3))
    store.load(first, 1)
    fourth = put(store, [30])
    assert kept(store, first, second, third, fourth) == [True, False, True, True]
    fifth = put(store, range(20))
    assert kept(store, first, third, fourth, fifth) == [False, False, True, True]
    assert store.metrics()["evictions"] == 3
    assert store.metrics()["memory_bytes"] == 3 * world.BLOCK_BYTES


def test_an_evicted_context_is_a_page_error_and_a_counted_miss(put: Any, world: Any) -> None:
    store = store_of(1, world)
    gone, here = put(store, [1, 2, 3]), put(store, [4])
    with pytest.raises(PageError, match=r"3 tokens of task 'task' is no longer stored \(evict"):
        store.load(gone, 0)
    with pytest.raises(PageError, match=r"no longer stored \(unknown\)"):
        store.lease([world.context_of([9])])
    for layer in (3, -1):
        with pytest.raises(PageError, match=f"no layer {layer}"):
            store.load(here, layer)
    store.load(here, 0)
    metrics = store.metrics()
    reasons = [metrics[f"misses_{name}"] for name in ("evictions", "unknown", "no_layer")]
    assert reasons == [1, 1, 2] and metrics["misses"] == 4 and metrics["hits"] == 1


def test_what_can_never_fit_is_refused_and_evicts_nothing(put: Any, world: Any) -> None:
    store = store_of(2, world)
    small = put(store, [1])
    large = world.context_of(range(33))
    assert not store.put(large, world.layers_of(33))
    assert kept(store, small, large) == [True, False]
    assert store.metrics()["refused"] == 1 and store.metrics()["evictions"] == 0


def test_a_context_without_tokens_or_layers_is_refused(world: Any) -> None:
    store = SlideStore(1000)
    assert not store.put(world.context_of([]), world.layers_of(0))
    assert not store.put(world.context_of([1]), [])
    assert store.contexts() == [] and store.metrics()["refused"] == 2


def test_a_pinned_session_stays_until_it_is_unpinned_in_its_namespace_only(
    put: Any, world: Any
) -> None:
    store = store_of(2, world)
    store.pin("agent")
    pinned = put(store, [1], "agent")
    foreign = put(store, [1], "agent", key=ContextKey("model", "tenant", "task"))
    newcomer = world.context_of(range(17))
    assert not store.put(newcomer, world.layers_of(17)), "one block of room is not two"
    assert kept(store, pinned, foreign) == [True, True]
    put(store, [6])
    assert kept(store, pinned, foreign) == [True, False]
    store.unpin("agent", "tenant")
    assert not store.put(newcomer, world.layers_of(17))
    store.unpin("agent")
    assert store.put(newcomer, world.layers_of(17))
    assert kept(store, pinned) == [False]


def test_a_leased_context_stays_until_the_lease_ends(put: Any, world: Any) -> None:
    store = store_of(2, world)
    first = put(store, [1], "a")
    with store.lease([first, first]):
        put(store, [2])
        put(store, [3])
        second = put(store, [4], "a")
        assert kept(store, first, second) == [True, True], "not superseded either"
        store.load(first, 0)
    lease = store.lease([second])
    lease.release()
    lease.release()
    put(store, [5])
    put(store, [6])
    assert kept(store, first, second) == [False, False]


def test_a_named_session_keeps_its_last_used_contexts_even_when_pinned(
    put: Any, world: Any
) -> None:
    store = SlideStore(1 << 20, copies_per_session=2)
    store.pin("a")
    first, second = put(store, [1], "a"), put(store, [2], "a")
    apart = [put(store, [at]) for at in range(10, 14)]
    apart += [put(store, [20], "a", isolated=True), put(store, [21], "b")]
    apart += [put(store, [22], "a", key=ContextKey("model", "default", "else"))]
    store.load(first, 0)
    third = put(store, [3], "a")
    assert kept(store, first, second, third) == [True, False, True]
    assert store.metrics()["superseded"] == 1 and store.metrics()["contexts"] == 2 + len(apart)


def test_of_one_text_the_least_exact_then_oldest_copy_is_superseded(put: Any) -> None:
    store = SlideStore(1 << 20, copies_per_content=2)
    exact = put(store, [1, 2])
    approximate = put(store, [1, 2], exact=False)
    put(store, [1, 2], isolated=True)
    newer = put(store, [1, 2], exact=False)
    assert kept(store, exact, approximate, newer) == [True, False, True]
    newest = put(store, [1, 2])
    assert kept(store, exact, newer, newest) == [True, False, True]
    another = put(store, [1, 2])
    assert kept(store, exact, newest, another) == [False, True, True]
    assert store.metrics()["superseded"] == 3 and store.metrics()["evictions"] == 0


def test_a_superseded_copy_makes_room_before_anything_is_evicted(put: Any, world: Any) -> None:
    store = store_of(3, world, copies_per_content=1)
    bystander = put(store, [8])
    put(store, range(32))
    put(store, range(32))
    assert kept(store, bystander) == [True] and store.metrics()["evictions"] == 0


def test_putting_a_context_again_replaces_its_tensors(put: Any, world: Any) -> None:
    store = SlideStore(1 << 20)
    context = put(store, [1, 2])
    other = world.layers_of(2, seed=9)
    assert store.put(context, other)
    assert torch.equal(store.load(context, 0)[0], other[0][0])
    assert store.contexts() == [context]
    assert store.metrics()["memory_bytes"] == world.BLOCK_BYTES


def test_a_namespace_is_held_to_its_quota_by_its_own_oldest_contexts(put: Any, world: Any) -> None:
    store = SlideStore(1 << 20, namespace_quota_bytes=4 * world.BLOCK_BYTES)
    other = ContextKey("model", "tenant", "task")
    first, second = put(store, range(20)), put(store, range(20, 40))
    apart = put(store, range(64), key=other)
    third = put(store, range(50, 55))
    assert kept(store, first, second, third, apart) == [False, True, True, True]
    large = world.context_of(range(65))
    assert not store.put(large, world.layers_of(65))
    assert kept(store, second, third) == [True, True]


def test_a_context_not_used_for_its_time_to_live_goes(
    put: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("cacheslide_agents.pages.holdings.monotonic", lambda: now)
    store = SlideStore(1 << 20, ttl_s=60)
    used, unused = put(store, [1]), put(store, [2])
    now = 1050.0
    store.load(used, 0)
    now = 1070.0
    with pytest.raises(PageError, match="expired"):
        store.load(unused, 0)
    assert store.find(world.KEY) == [used]
    with store.lease([used]):
        now = 1200.0
        assert store.find(world.KEY) == [used]
    with pytest.raises(PageError, match="expired"):
        store.lease([used])
    put(store, [3])
    now = 1300.0
    assert store.contexts() == []
    assert store.metrics()["expired"] == 3


def test_counts_are_the_metrics_that_are_counted_as_it_happens(put: Any) -> None:
    store = SlideStore(1 << 20)
    for seed in range(3):
        store.load(put(store, [seed]), 0)
    counts, metrics = store.counts(), store.metrics()
    assert counts["hits"] == counts["puts"] == 3 and counts["memory_bytes"] > 0
    assert {name: metrics[name] for name in counts} == counts


def test_clear_forgets_every_context(put: Any, world: Any) -> None:
    store = SlideStore(1 << 20)
    store.pin("a")
    pinned, chunk = put(store, [1], "a"), put(store, [2], isolated=True)
    lease = store.lease([pinned])
    store.clear()
    lease.release()
    assert store.contexts() == [] and store.find_isolated(world.KEY, chunk.ids) is None
    assert {store.metrics()[name] for name in ("contexts", "pages", "memory_bytes")} == {0}
    put(store, [2], isolated=True)


def test_a_closed_store_says_so(put: Any, world: Any) -> None:
    with SlideStore(1 << 20) as store:
        context = put(store, [1])
    store.close()
    for use in (lambda: store.load(context, 0), lambda: put(store, [2]), store.flush):
        with pytest.raises(StoreError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("layers", "residuals", "named"),
    [
        ([(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4))], {}, r"keys of layer 0 are \[3, 2, 4\]"),
        ([(torch.zeros(3, 3, 4), torch.zeros(3, 4))], {}, r"values of layer 0 are \[3, 4\]"),
        ([(torch.zeros(3, 3, 4), torch.zeros(2, 3, 4))], {}, r"all layers must be alike"),
        ([(torch.zeros(3, 3, 4).int(),) * 2], {}, r"int32 cannot be stored"),
        ([(torch.zeros(3, 3, 4),) * 2], {7: torch.zeros(4, 8)}, r"residuals of layer 7 are \[4, 8"),
    ],
)
def test_tensors_that_do_not_hold_the_tokens_are_refused(
    layers: Any, residuals: Any, named: str, world: Any
) -> None:
    with pytest.raises(PageError, match=named):
        SlideStore(1000).put(world.context_of([1, 2, 3]), layers, residuals)


@pytest.mark.parametrize(
    ("start", "cached_start", "length", "flags"),
    [(-1, 0, 5, 5), (0, 0, 21, 21), (8, 0, 3, 3), (0, 18, 5, 5), (0, -1, 5, 5), (0, 0, 5, 4)],
)
def test_a_run_that_does_not_lie_in_its_contexts_is_refused(
    start: int, cached_start: int, length: int, flags: int, put: Any, world: Any
) -> None:
    store = SlideStore(1 << 20)
    old = put(store, range(20))
    run = ReusedRun(old, start, cached_start, length, np.zeros(flags, dtype=np.bool_))
    with pytest.raises(PageError, match="a reused run of"):
        store.put(world.context_of(range(10)), world.layers_of(10), reused=[run])
    overlapping = [ReusedRun(old, at, at, 5, np.zeros(5, dtype=np.bool_)) for at in (0, 4)]
    with pytest.raises(PageError, match="overlaps"):
        store.put(world.context_of(range(10)), world.layers_of(10), reused=overlapping)
    assert store.contexts() == [old]


@pytest.mark.parametrize(
    "limit", ["budget_bytes", "copies_per_content", "copies_per_session", "disk_bytes"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_refused_by_name(limit: str, value: int) -> None:
    with pytest.raises(RequestError, match=limit):
        SlideStore(**{"budget_bytes": 1000, limit: value})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ttl_s"):
        SlideStore(1000, ttl_s=value)
