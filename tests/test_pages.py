"""`MemoryStore`: what it keeps, what it lets go, and what it says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheslide_agents.errors import PageError, RequestError
from cacheslide_agents.pages import ContextKey, MemoryStore, StoredContext
from cacheslide_agents.pages.base import LayerKV

KEY = ContextKey("model", "tenant", "task")
TOKEN_BYTES = 2 * 2 * 3 * 4 * 4  # layers x (keys, values) x heads x head_dim x float32


def context_of(
    *ids: int,
    session: str | None = None,
    key: ContextKey = KEY,
    isolated: bool = False,
    exact: bool = True,
) -> StoredContext:
    return StoredContext(
        key=key,
        ids=np.array(ids, dtype=np.int64),
        exact=np.full(len(ids), exact),
        session=session,
        isolated=isolated,
    )


def layers_of(context: StoredContext, layers: int = 2) -> list[LayerKV]:
    shape = (3, len(context), 4)
    return [(torch.full(shape, float(at)), torch.full(shape, -float(at))) for at in range(layers)]


def put(store: MemoryStore, *ids: int, **fields: Any) -> StoredContext:
    context = context_of(*ids, **fields)
    assert store.put(context, layers_of(context))
    return context


def kept(store: MemoryStore, *contexts: StoredContext) -> list[bool]:
    """Whether each context is in memory; touches nothing."""
    present = {id(context) for context in store.find(KEY)}
    return [id(context) in present for context in contexts]


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_what_was_put_is_loaded_layer_by_layer_without_a_copy() -> None:
    store = MemoryStore(10_000)
    context = context_of(1, 2, 3)
    layers = layers_of(context)
    assert store.put(context, layers)
    for layer, (keys, values) in enumerate(layers):
        got_keys, got_values = store.load(context, layer)
        assert got_keys.data_ptr() == keys.data_ptr()
        assert got_values.data_ptr() == values.data_ptr()
        assert torch.equal(got_keys, keys) and torch.equal(got_values, values)


def test_a_view_is_copied_so_that_its_slack_memory_is_not_kept() -> None:
    store = MemoryStore(10_000)
    context = context_of(1, 2, 3)
    arena = torch.arange(2 * 3 * 100 * 4.0).reshape(2, 3, 100, 4)
    transposed = torch.arange(3 * 3 * 4.0).reshape(3, 3, 4).transpose(0, 1)
    assert store.put(context, [(arena[0, :, 5:8], arena[1, :, 5:8]), (transposed, arena[1, :, :3])])
    loaded = [tensor for layer in range(2) for tensor in store.load(context, layer)]
    assert torch.equal(loaded[0], arena[0, :, 5:8]) and torch.equal(loaded[3], arena[1, :, :3])
    assert loaded[2].data_ptr() == transposed.data_ptr(), "a full tensor is taken in any layout"
    assert storage_bytes(loaded) == store.metrics()["memory_bytes"] == 3 * TOKEN_BYTES


def test_resident_bytes_equal_what_the_tensors_hold() -> None:
    store = MemoryStore(20_000)
    tensors = []
    for length in (1, 16, 17, 40):
        context = put(store, *range(length))
        tensors += [tensor for layer in range(2) for tensor in store.load(context, layer)]
    metrics = store.metrics()
    assert metrics["memory_bytes"] == storage_bytes(tensors) == 74 * TOKEN_BYTES
    assert metrics["pages"] == 2 * (1 + 1 + 2 + 3)
    assert metrics["contexts"] == 4 and metrics["memory_budget_bytes"] == 20_000


def test_residuals_are_stored_counted_and_optional() -> None:
    store = MemoryStore(10_000)
    context = context_of(1, 2, 3)
    checkpoint = torch.randn(10, 8)[2:5]
    assert store.put(context, layers_of(context), {3: checkpoint})
    stored = store.residual(context, 3)
    assert stored is not None and torch.equal(stored, checkpoint)
    assert stored.untyped_storage().nbytes() == 3 * 8 * 4
    assert store.residual(context, 0) is None
    assert store.residual(context_of(1, 2, 3), 3) is None
    assert store.metrics()["memory_bytes"] == 3 * TOKEN_BYTES + 3 * 8 * 4
    longer = context_of(1, 2, 3, 4)
    assert store.put(longer, layers_of(longer), {3: checkpoint}), "the last token was generated"


def test_stored_tensors_carry_no_gradient() -> None:
    store = MemoryStore(10_000)
    context = context_of(1)
    grown = torch.ones(3, 1, 4, requires_grad=True)
    assert store.put(context, [(grown, grown * 2)])
    assert not any(tensor.requires_grad for tensor in store.load(context, 0))


def test_find_gives_the_session_first_then_the_newest_of_the_same_key() -> None:
    store = MemoryStore(100_000)
    a1, b1 = put(store, 1, session="a"), put(store, 2, session="b")
    a2, b2 = put(store, 3, session="a"), put(store, 4, session="b")
    put(store, 5, session="a", key=ContextKey("model", "other tenant", "task"))
    put(store, 6, session="a", isolated=True)
    assert store.find(KEY) == [b2, a2, b1, a1]
    assert store.find(KEY, "a") == [a2, a1, b2, b1]
    assert store.find(KEY, "unheard of") == [b2, a2, b1, a1]
    assert store.find(ContextKey("other model", "tenant", "task")) == []


def test_find_isolated_wants_the_exact_tokens_of_a_chunk_computed_alone() -> None:
    store = MemoryStore(100_000)
    put(store, 1, 2, 3)
    chunk = put(store, 1, 2, isolated=True)
    assert store.find_isolated(KEY, np.array([1, 2])) is chunk
    assert store.find_isolated(KEY, np.array([1, 2], dtype=np.int32)) is chunk
    assert store.find_isolated(KEY, np.array([1, 2, 3])) is None
    assert store.find_isolated(ContextKey("model", "tenant", "else"), np.array([1, 2])) is None


def test_the_least_recently_used_context_makes_room() -> None:
    store = MemoryStore(9 * TOKEN_BYTES)
    first, second, third = (put(store, *range(at, at + 3)) for at in (0, 10, 20))
    store.load(first, 1)
    fourth = put(store, 30)
    assert kept(store, first, second, third, fourth) == [True, False, True, True]
    assert store.metrics()["evictions"] == 1
    fifth = put(store, *range(40, 47))
    assert kept(store, first, third, fourth, fifth) == [False, False, True, True]
    assert store.metrics()["memory_bytes"] == 8 * TOKEN_BYTES


def test_an_evicted_context_is_a_page_error_and_a_counted_miss() -> None:
    store = MemoryStore(3 * TOKEN_BYTES)
    gone = put(store, 1, 2, 3)
    here = put(store, 4, 5, 6)
    with pytest.raises(PageError, match="3 tokens of task 'task' is no longer in memory"):
        store.load(gone, 0)
    for layer in (2, -1):
        with pytest.raises(PageError, match=f"no layer {layer}"):
            store.load(here, layer)
    store.load(here, 0)
    assert (store.metrics()["misses"], store.metrics()["hits"]) == (3, 1)


def test_what_can_never_fit_is_refused_and_evicts_nothing() -> None:
    store = MemoryStore(3 * TOKEN_BYTES)
    small = put(store, 1, 2, 3)
    large = context_of(*range(4))
    assert not store.put(large, layers_of(large))
    assert kept(store, small, large) == [True, False]
    assert store.metrics()["refused"] == 1 and store.metrics()["evictions"] == 0


def test_a_context_without_tokens_or_layers_is_refused() -> None:
    store = MemoryStore(1000)
    assert not store.put(context_of(), layers_of(context_of()))
    assert not store.put(context_of(1), [])
    assert store.find(KEY) == [] and store.metrics()["refused"] == 2


def test_a_pinned_session_stays_until_it_is_unpinned() -> None:
    store = MemoryStore(3 * TOKEN_BYTES)
    store.pin("agent")
    pinned = put(store, 1, 2, session="agent")
    other = put(store, 3, session="other")
    newcomer = context_of(4, 5)
    assert not store.put(newcomer, layers_of(newcomer)), "one token of room is not two"
    assert kept(store, pinned, other) == [True, True] and store.metrics()["refused"] == 1
    put(store, 6)
    assert kept(store, pinned, other) == [True, False]
    store.unpin("agent")
    store.unpin("never pinned")
    assert store.put(newcomer, layers_of(newcomer))
    assert kept(store, pinned) == [False]


def test_a_named_session_keeps_its_last_used_contexts_even_when_pinned() -> None:
    store = MemoryStore(100_000, copies_per_session=2)
    store.pin("a")
    first, second = put(store, 1, session="a"), put(store, 2, session="a")
    apart = [put(store, at, session=None) for at in range(10, 14)]
    apart += [put(store, 20, session="a", isolated=True), put(store, 21, session="b")]
    apart += [put(store, 22, session="a", key=ContextKey("model", "tenant", "else"))]
    store.load(first, 0)
    third = put(store, 3, session="a")
    assert kept(store, first, second, third) == [True, False, True]
    assert store.metrics()["superseded"] == 1 and store.metrics()["contexts"] == 2 + len(apart)


def test_of_one_text_the_least_exact_then_oldest_copy_is_superseded() -> None:
    store = MemoryStore(100_000, copies_per_content=2)
    exact = put(store, 1, 2)
    approximate = put(store, 1, 2, exact=False)
    put(store, 1, 2, isolated=True)
    newer = put(store, 1, 2, exact=False)
    assert kept(store, exact, approximate, newer) == [True, False, True]
    newest = put(store, 1, 2)
    assert kept(store, exact, newer, newest) == [True, False, True]
    another = put(store, 1, 2)
    assert kept(store, exact, newest, another) == [False, True, True]
    assert store.metrics()["superseded"] == 3 and store.metrics()["evictions"] == 0


def test_a_superseded_copy_makes_room_before_anything_is_evicted() -> None:
    store = MemoryStore(4 * TOKEN_BYTES, copies_per_content=1)
    bystander = put(store, 8)
    put(store, 1, 2, 3)
    put(store, 1, 2, 3)
    assert kept(store, bystander) == [True]
    assert store.metrics()["evictions"] == 0


def test_putting_a_context_again_replaces_its_tensors() -> None:
    store = MemoryStore(1000)
    context = put(store, 1, 2)
    corrected = [(keys + 1, values) for keys, values in layers_of(context)]
    assert store.put(context, corrected)
    assert torch.equal(store.load(context, 0)[0], corrected[0][0])
    assert store.find(KEY) == [context] and store.metrics()["memory_bytes"] == 2 * TOKEN_BYTES


def test_clear_forgets_every_context() -> None:
    store = MemoryStore(1000)
    store.pin("a")
    put(store, 1, session="a")
    chunk = put(store, 2, isolated=True)
    store.clear()
    assert store.find(KEY) == [] and store.find_isolated(KEY, chunk.ids) is None
    assert {store.metrics()[name] for name in ("contexts", "pages", "memory_bytes")} == {0}
    put(store, 2, isolated=True)


@pytest.mark.parametrize(
    ("layers", "residuals", "named"),
    [
        ([(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4))], {}, r"keys of layer 0 are \[3, 2, 4\]"),
        ([(torch.zeros(3, 3, 4), torch.zeros(3, 4))], {}, r"values of layer 0 are \[3, 4\]"),
        ([(torch.zeros(3, 3, 4),) * 2], {7: torch.zeros(4, 8)}, r"residuals of layer 7 are \[4, 8"),
    ],
)
def test_tensors_that_do_not_hold_the_tokens_are_refused(
    layers: Any, residuals: Any, named: str
) -> None:
    with pytest.raises(PageError, match=named):
        MemoryStore(1000).put(context_of(1, 2, 3), layers, residuals)


@pytest.mark.parametrize("limit", ["budget_bytes", "copies_per_content", "copies_per_session"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_refused_by_name(limit: str, value: int) -> None:
    with pytest.raises(RequestError, match=limit):
        MemoryStore(**{"budget_bytes": 1000, limit: value})  # type: ignore[arg-type]
