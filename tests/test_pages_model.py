"""`SlideStore` against a dictionary, under random operations, crashes and several threads."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cacheslide_agents.errors import PageError, StoreError
from cacheslide_agents.pages import EVICTIONS, Lru, SlideStore, StoredContext


def _support(name: str) -> Any:
    """State machines are made at import, before any fixture."""
    spec = spec_from_file_location(name, Path(__file__).parent / "support" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


world = _support("page_world")
BLOCKS = 10
DISK_BYTES = 60 * world.BLOCK_BYTES
SESSIONS = ["a", "b", "c"]


class Chains(RuleBasedStateMachine):
    """Agents whose turns reuse, move, drop and correct what was stored.

    `turns` is the dictionary: what every context that was ever put must give back, by its tokens
    (they never repeat). A store may lose contexts where its budgets say so; it may never answer
    with anything else, and what was flushed and not superseded or evicted is there after a crash.
    """

    disk = False
    disk_bytes = DISK_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.folder = Path(tempfile.mkdtemp()) if self.disk else None
        self.eviction = EVICTIONS[0]
        self.turns: dict[bytes, Any] = {}
        self.last: dict[str, Any] = {}
        self.flushed: dict[str, Any] = {}
        self.store = self.opened()

    def opened(self) -> SlideStore:
        return SlideStore(
            BLOCKS * world.BLOCK_BYTES,
            self.folder,
            disk_bytes=self.disk_bytes,
            eviction=self.eviction,
            write_ahead=False,
        )

    def true_layers(self, context: StoredContext) -> Any:
        return self.turns[context.ids.tobytes()].layers

    @rule(
        session=st.sampled_from(SESSIONS), tokens=st.integers(1, 60), seed=st.integers(0, 1 << 20)
    )
    def begin(self, session: str, tokens: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed + len(self.turns) * 7919)
        turn = world.first_turn(self.rng, tokens, session)
        self.put(session, turn, turn.layers, [])

    @rule(
        session=st.sampled_from(SESSIONS),
        source=st.sampled_from(SESSIONS),
        new=st.integers(1, 30),
        removed=st.integers(0, 20),
        corrected=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    )
    def go_on(self, session: str, source: str, new: int, removed: int, corrected: float) -> None:
        """The next turn of a session, from its own last context or another session's."""
        last = self.last.get(source)
        if last is None or len(last.context) > 90:
            return
        removed = min(removed, len(last.context) - 1)
        if len(last.context) < 2:
            return
        turn, given, runs = world.next_turn(
            self.rng, last, new, corrected=corrected, removed=removed
        )
        object.__setattr__(turn.context, "session", session)
        try:
            lease = self.store.lease([last.context])
        except PageError:
            return
        with lease:
            for layer in range(world.LAYERS):
                self.store.load(last.context, layer)
            self.put(session, turn, given, runs, lease)

    def put(self, session: str, turn: Any, given: Any, runs: Any, lease: Any = None) -> None:
        self.turns[turn.context.ids.tobytes()] = turn
        if self.store.put(turn.context, given, reused=runs, lease=lease):
            self.last[session] = turn
            assert world.same(self.store, turn)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        stored = self.store.contexts()
        if not stored:
            return
        context = data.draw(st.sampled_from(stored))
        layer = data.draw(st.integers(0, world.LAYERS - 1))
        start = data.draw(st.integers(0, len(context)))
        ranges = [(start, data.draw(st.integers(start, len(context))))]
        keys, values = self.store.load(context, layer, ranges)
        true = self.true_layers(context)[layer]
        assert torch.equal(keys, true[0][:, slice(*ranges[0])])
        assert torch.equal(values, true[1][:, slice(*ranges[0])])

    @rule(session=st.sampled_from(SESSIONS), pinned=st.booleans())
    def pin(self, session: str, pinned: bool) -> None:
        (self.store.pin if pinned else self.store.unpin)(session)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.last, self.flushed = {}, {}

    @invariant()
    def what_is_stored_is_true_and_within_budget(self) -> None:
        for context in self.store.contexts():
            true = self.true_layers(context)
            for layer in (0, world.LAYERS - 1):
                if context not in self.store.contexts():
                    continue  # under `Lru` reading another one may have driven it out
                keys, values = self.store.load(context, layer)
                assert torch.equal(keys, true[layer][0]) and torch.equal(values, true[layer][1])
        metrics = self.store.metrics()
        assert metrics["memory_bytes"] <= BLOCKS * world.BLOCK_BYTES
        assert metrics.get("ssd_bytes", 0) <= self.disk_bytes
        sessions = [context.session for context in self.store.contexts()]
        assert len(sessions) == len(set(sessions)), "a session keeps one context"

    def teardown(self) -> None:
        self.store.close()
        if self.folder is not None:
            shutil.rmtree(self.folder)


class OnDisk(Chains):
    """The same with an SSD tier, restarts and crashes."""

    disk = True

    @rule(eviction=st.sampled_from(EVICTIONS))
    def restart(self, eviction: Any) -> None:
        """In order: nothing is lost."""
        before, after = self.restarted(eviction)
        assert after == before

    def restarted(self, eviction: Any) -> tuple[set[bytes], set[bytes]]:
        """What was stored before and what is after."""
        before = {context.ids.tobytes() for context in self.store.contexts()}
        self.store.close()
        self.eviction = eviction
        self.reopen()
        return before, {context.ids.tobytes() for context in self.store.contexts()}

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.flushed = {
            context.session: context.ids.tobytes()
            for context in self.store.contexts()
            if context.session is not None
        }

    @rule()
    def crash(self) -> None:
        """All that is not on SSD is gone; each flushed session is as it was, or further."""
        evicted = self.store.metrics()["evictions"]
        self.crashed()
        found = {context.session: context.ids.tobytes() for context in self.store.contexts()}
        if not evicted:
            assert set(self.flushed) <= set(found)
        self.flushed = {name: ids for name, ids in self.flushed.items() if name in found}

    def crashed(self) -> None:
        disk = self.store._holdings.disk
        assert disk is not None
        disk.close()
        self.reopen()

    def reopen(self) -> None:
        self.store = self.opened()
        self.last = {}
        for context in self.store.contexts():
            assert context.session is not None
            self.last[context.session] = world.Turn(context, self.true_layers(context))

    @rule()
    def collect(self) -> None:
        self.store.gc()
        assert self.store.metrics()["ssd_bytes"] <= self.disk_bytes


class ShortOfDisk(OnDisk):
    """An SSD tier hardly larger than memory: to write one context another one has to go."""

    disk_bytes = 14 * world.BLOCK_BYTES

    @rule(eviction=st.sampled_from(EVICTIONS))
    def restart(self, eviction: Any) -> None:
        before, after = self.restarted(eviction)
        assert after <= before

    @rule()
    def flush(self) -> None:
        with suppress(StoreError):  # pinned contexts may leave no room
            self.store.flush()

    @rule()
    def crash(self) -> None:
        self.crashed()


RUNS = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestInMemory = Chains.TestCase
TestInMemory.settings = RUNS
TestOnDisk = OnDisk.TestCase
TestOnDisk.settings = RUNS
TestShortOfDisk = ShortOfDisk.TestCase
TestShortOfDisk.settings = RUNS


def test_what_cannot_be_committed_anew_is_not_written_twice() -> None:
    """A flushed context, and its next turn that is not: their common extent stays where it is."""
    machine = ShortOfDisk()
    machine.begin(seed=0, session="a", tokens=33)
    machine.begin(seed=0, session="b", tokens=17)
    machine.restart(eviction=Lru())
    machine.go_on(corrected=0.05, new=1, removed=0, session="a", source="a")
    machine.flush()
    machine.go_on(corrected=0.0, new=1, removed=0, session="a", source="a")
    before = machine.store.metrics()["ssd_bytes"]
    machine.collect()
    assert machine.store.metrics()["ssd_bytes"] <= before
    machine.teardown()


def work_on(store: SlideStore, seed: int) -> int:
    """Chained turns of two sessions of its own; right answers counted, wrong ones raised."""
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    right = 0
    last: dict[str, Any] = {}
    for _ in range(25):
        session = f"agent {seed} {choose.randint(0, 1)}"
        turn = last.get(session)
        if turn is None or len(turn.context) > 90:
            new = world.first_turn(rng, choose.randint(10, 60), session)
            stored = store.put(new.context, new.layers)
        else:
            new, given, runs = world.next_turn(rng, turn, 8, corrected=0.2)
            try:
                with store.lease([turn.context]) as lease:
                    assert world.same(store, turn)
                    stored = store.put(new.context, given, reused=runs, lease=lease)
            except PageError:
                last.pop(session)
                continue
        if stored:
            last[session] = new
            try:
                assert world.same(store, new)
                right += 1
            except PageError:
                last.pop(session)
    return right


@pytest.mark.parametrize("eviction", EVICTIONS, ids=lambda eviction: eviction.name)
def test_threads_never_see_a_wrong_tensor_nor_a_broken_budget(
    tmp_path: Path, eviction: Any
) -> None:
    budget = 40 * world.BLOCK_BYTES
    with SlideStore(budget, tmp_path, eviction=eviction) as store, ThreadPoolExecutor(4) as threads:
        right = list(threads.map(lambda seed: work_on(store, seed), range(4)))
        assert sum(right) > 60, "the threads did work"
        metrics = store.metrics()
        assert metrics["memory_bytes"] <= budget
        assert metrics["spilled_blocks"] > 0 and metrics["misses"] == 0
        deadline = monotonic() + 30  # a spill that the last thread set off may be under way
        while any(block.busy for block in store._holdings.host.blocks):
            assert monotonic() < deadline, "blocks are held that nobody reads or writes"
            sleep(0.01)
    with SlideStore(budget, tmp_path, read_only=True) as store:
        assert len(store.contexts()) == 8
