"""`MemoryStore` against a plain model, under random operations and from several threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages import ContextKey, MemoryStore, StoredContext

KEY = ContextKey("model", "tenant", "task")
TOKEN_BYTES = 2 * 4  # keys and values of one float32
BUDGET = 12 * TOKEN_BYTES
SESSIONS = [None, "a", "b"]


def context_of(ids: tuple[int, ...], session: str | None, exact: bool = True) -> StoredContext:
    return StoredContext(KEY, np.array(ids), np.full(len(ids), exact), session=session)


class AgainstAModel(RuleBasedStateMachine):
    """The model is the list of kept contexts, least recently used first, found by brute force."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(BUDGET, copies_per_content=2, copies_per_session=3)
        self.kept: list[StoredContext] = []
        self.arrived: dict[StoredContext, int] = {}
        self.pinned: set[str] = set()

    def is_pinned(self, context: StoredContext) -> bool:
        return context.session in self.pinned

    @rule(
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        session=st.sampled_from(SESSIONS),
        exact=st.booleans(),
    )
    def put(self, ids: tuple[int, ...], session: str | None, exact: bool) -> None:
        context = context_of(ids, session, exact)
        value = torch.full((1, len(ids), 1), float(len(self.arrived)))
        expected = self.expected_after(context)
        assert self.store.put(context, [(value, -value)]) == (expected is not None)
        self.arrived[context] = len(self.arrived)
        self.kept = self.kept if expected is None else [*expected, context]

    def expected_after(self, new: StoredContext) -> list[StoredContext] | None:
        """What remains of `kept` when `new` comes, or `None` if it does not fit."""
        rest = list(self.kept)
        copies = [old for old in rest if np.array_equal(old.ids, new.ids)]
        copies.sort(key=lambda c: (self.is_pinned(c), bool(c.exact.all()), self.arrived[c]))
        if len(copies) == 2:
            rest.remove(copies[0])
        turns = [old for old in rest if new.session and old.session == new.session]
        if len(turns) == 3:
            rest.remove(turns[0])
        free = [old for old in rest if not self.is_pinned(old)]
        while sum(map(len, rest)) + len(new) > BUDGET // TOKEN_BYTES:
            if not free:
                return None
            rest.remove(free.pop(0))
        return rest

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if not self.arrived:
            return
        context = data.draw(st.sampled_from(list(self.arrived)))
        if context not in self.kept:
            with pytest.raises(PageError):
                self.store.load(context, 0)
            return
        keys, values = self.store.load(context, 0)
        expected = torch.full((1, len(context), 1), float(self.arrived[context]))
        assert torch.equal(keys, expected) and torch.equal(values, -expected)
        self.kept.remove(context)
        self.kept.append(context)

    @rule(session=st.sampled_from(["a", "b"]))
    def pin(self, session: str) -> None:
        self.store.pin(session)
        self.pinned.add(session)

    @rule(session=st.sampled_from(["a", "b"]))
    def unpin(self, session: str) -> None:
        self.store.unpin(session)
        self.pinned.discard(session)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.kept = []

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        newest_first = sorted(self.kept, key=lambda c: -self.arrived[c])
        for session in SESSIONS:
            own_first = sorted(newest_first, key=lambda c: session not in (None, c.session))
            assert self.store.find(KEY, session) == own_first
        metrics = self.store.metrics()
        assert metrics["memory_bytes"] == TOKEN_BYTES * sum(map(len, self.kept)) <= BUDGET
        assert metrics["contexts"] == len(self.kept)


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def work_on(store: MemoryStore, seed: int) -> dict[StoredContext, bool]:
    """Puts and loads at random; each context put and whether it was admitted."""
    choose, admitted = random.Random(seed), {}
    for step in range(120):
        mark = seed * 1000 + step
        context = context_of((mark,) * choose.randint(1, 14), f"agent {choose.randint(0, 40)}")
        value = torch.full((1, len(context), 1), float(mark))
        admitted[context] = store.put(context, [(value, value + 0.5)])
        choose.choice([store.pin, store.unpin])(f"agent {choose.randint(0, 1)}")
        for found in store.find(KEY, context.session)[:3]:
            try:
                keys, values = store.load(found, 0)
            except PageError:
                continue
            assert keys.shape == (1, len(found), 1)
            assert (keys == int(found.ids[0])).all() and torch.equal(values, keys + 0.5)
    return admitted


def test_eight_threads_never_see_a_wrong_tensor_nor_a_broken_budget() -> None:
    store = MemoryStore(BUDGET)
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(work_on, store, seed) for seed in range(8)]
        model = {c: admitted for future in futures for c, admitted in future.result().items()}

    left = store.find(KEY)
    metrics = store.metrics()
    assert len(model) == 8 * 120
    assert all(model[context] for context in left)
    assert metrics["memory_bytes"] == TOKEN_BYTES * sum(map(len, left)) <= BUDGET
    assert metrics["refused"] == sum(not admitted for admitted in model.values())
    dropped = metrics["evictions"] + metrics["superseded"]
    assert sum(model.values()) == len(left) + dropped
    assert metrics["evictions"] > 100 and metrics["hits"] > 100, "the threads did work"
