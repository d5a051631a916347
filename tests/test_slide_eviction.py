"""What each eviction policy writes, and when; what is shared, corrected in place or packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.errors import RequestError
from cacheslide_agents.pages import EVICTIONS, Lru, ReusedRun, Slide, SlideStore
from cacheslide_agents.pages.block import Block, Place, State
from cacheslide_agents.pages.eviction import eviction_named
from cacheslide_agents.pages.geometry import Geometry

HEADER = 4096
SHAPE = Geometry(3, 2, 4, "float32")


@pytest.fixture(scope="module")
def world(support: Callable[[str], ModuleType]) -> Any:
    return support("page_world")


def store_of(world: Any, blocks: int, path: Path | None = None, **how: Any) -> SlideStore:
    return SlideStore(blocks * world.BLOCK_BYTES, path, write_ahead=False, **how)


def kept_all(turn: Any, start: int = 0) -> ReusedRun:
    length = len(turn.context)
    return ReusedRun(turn.context, start, 0, length, np.zeros(length, dtype=np.bool_))


def test_slide_drops_clean_blocks_first_then_writes_the_most_corrected() -> None:
    clean, cleaner = (Block(SHAPE, copy=Place(1, at), used=at) for at in (7, 3))
    little, much = (Block(SHAPE, copy=Place(1, 9), corrected=c) for c in (0b1, 0b111))
    unsaved, older = Block(SHAPE, used=8), Block(SHAPE, used=2)
    blocks = [much, unsaved, clean, little, older, cleaner]
    assert Slide().order(blocks) == [cleaner, clean, older, unsaved, much, little]
    assert [b.state for b in (clean, much, unsaved)] == [State.CLEAN, State.DIRTY, State.UNSAVED]
    for at, block in enumerate(blocks):
        block.used = at
    assert Lru().order(reversed(blocks)) == blocks


def test_policies_are_found_by_name() -> None:
    assert [e.name for e in EVICTIONS] == ["slide", "lru_write_through", "lru_write_back"]
    assert eviction_named("lru_write_through") == Lru(write_through=True)
    with pytest.raises(RequestError, match="known: slide, lru_write_through, lru_write_back"):
        eviction_named("fifo")


def test_write_through_writes_at_once_and_the_others_when_memory_is_short(
    tmp_path: Path, world: Any
) -> None:
    for eviction in EVICTIONS:
        with store_of(world, 8, tmp_path / eviction.name, eviction=eviction) as store:
            turns = [world.first_turn(np.random.default_rng(at), 64) for at in range(3)]
            for turn in turns[:2]:
                store.put(turn.context, turn.layers)
            written = store.metrics()["ssd_write_bytes"]
            expected = 2 * (HEADER + 4 * world.BLOCK_BYTES) if eviction.write_through else 0
            assert written == expected
            store.put(turns[2].context, turns[2].layers)
            late = 3 if eviction.write_through else 1
            assert store.metrics()["ssd_write_bytes"] == late * (HEADER + 4 * world.BLOCK_BYTES)
            assert all(world.same(store, turn) for turn in turns)


def test_a_moved_run_is_shared_and_only_new_tokens_take_memory(world: Any) -> None:
    rng, store = np.random.default_rng(0), store_of(world, 100)
    old = world.first_turn(rng, 320)
    store.put(old.context, old.layers)
    new, given, runs = world.next_turn(rng, old, 5, corrected=0.0, removed=30)
    assert store.put(new.context, given, reused=runs)
    assert store.metrics()["memory_bytes"] == 21 * world.BLOCK_BYTES
    assert store.metrics()["dirtied_bytes"] == 325 * world.TOKEN_BYTES
    assert world.same(store, new) and world.same(store, old)


def test_corrections_of_a_superseded_turn_are_made_in_place(tmp_path: Path, world: Any) -> None:
    rng, store = np.random.default_rng(1), store_of(world, 100, tmp_path)
    old = world.first_turn(rng, 320, "agent")
    store.put(old.context, old.layers)
    store.flush()
    new, given, runs = world.next_turn(rng, old, 16, corrected=0.1)
    corrected = sum(int(run.corrected.sum()) for run in runs)
    with store.lease([old.context]) as lease:
        store.put(new.context, given, reused=runs, lease=lease)
    metrics = store.metrics()
    assert metrics["memory_bytes"] == 21 * world.BLOCK_BYTES, "one block more, for new tokens"
    assert metrics["dirtied_bytes"] == (320 + 16 + corrected) * world.TOKEN_BYTES
    assert metrics["memory_dirty_bytes"] > 0 and metrics["contexts"] == 1
    assert world.same(store, new)


@pytest.mark.parametrize("reader", ["another session", "a foreign lease"])
def test_corrections_are_made_elsewhere_while_others_read(reader: str, world: Any) -> None:
    rng, store = np.random.default_rng(2), store_of(world, 100)
    old = world.first_turn(rng, 320, "agent")
    store.put(old.context, old.layers)
    other = old
    if reader == "another session":
        length = len(old.context)
        other = world.Turn(world.context_of(old.context.ids, "friend"), old.layers)
        assert store.put(other.context, old.layers, reused=[kept_all(old)])
        assert store.metrics()["memory_bytes"] == length // 16 * world.BLOCK_BYTES
        foreign = store.lease([])
    else:
        foreign = store.lease([old.context])
    new, given, runs = world.next_turn(rng, old, 4, corrected=0.1)
    with store.lease([old.context]) as lease:
        assert store.put(new.context, given, reused=runs, lease=lease)
    assert world.same(store, new) and world.same(store, other)
    foreign.release()


def test_text_that_stands_twice_is_corrected_once(world: Any) -> None:
    store = store_of(world, 100)
    old = world.first_turn(np.random.default_rng(3), 32, "agent")
    store.put(old.context, old.layers)
    flags = np.arange(32) % 3 == 0
    runs = [
        ReusedRun(old.context, 0, 0, 32, flags),
        ReusedRun(old.context, 32, 0, 32, np.zeros(32, dtype=np.bool_)),
    ]
    new = world.layers_of(64, seed=5)
    for layer, pair in enumerate(new):
        for mine, true in zip(pair, old.layers[layer], strict=True):
            mine[:, 32:] = true
            mine[:, np.flatnonzero(~flags)] = true[:, np.flatnonzero(~flags)]
    context = world.context_of(np.tile(old.context.ids, 2), "agent")
    assert store.put(context, new, reused=runs)
    assert world.same(store, world.Turn(context, new))


def test_few_corrected_rows_of_many_blocks_are_written_together(tmp_path: Path, world: Any) -> None:
    """320 tokens in 20 blocks, one corrected in each: 20 rows are two blocks, not twenty."""
    written = {}
    for eviction in EVICTIONS:
        path = tmp_path / eviction.name
        store = store_of(world, 100, path, eviction=eviction)
        old = world.first_turn(np.random.default_rng(4), 320, "agent")
        store.put(old.context, old.layers)
        store.flush()
        before = store.metrics()["ssd_write_bytes"]
        flags = np.arange(320) % 16 == 3
        true = world.layers_of(320, seed=6)
        for layer, pair in enumerate(true):
            for mine, kept in zip(pair, old.layers[layer], strict=True):
                mine[:, ~flags] = kept[:, ~flags]
        context = world.context_of(old.context.ids, "agent")
        assert store.put(context, true, reused=[ReusedRun(old.context, 0, 0, 320, flags)])
        store.flush()
        written[eviction.name] = store.metrics()["ssd_write_bytes"] - before - HEADER
        assert world.same(store, world.Turn(context, true))
        store.close()
        with store_of(world, 100, path, read_only=True) as store:
            (again,) = store.contexts()
            assert world.same(store, world.Turn(again, true))
    assert written == {
        "slide": 2 * world.BLOCK_BYTES,
        "lru_write_through": 20 * world.BLOCK_BYTES,
        "lru_write_back": 20 * world.BLOCK_BYTES,
    }


def test_a_ragged_context_gets_blocks_of_its_own(world: Any) -> None:
    """One token of each of 20 blocks reused: sharing would keep 20 blocks for 20 tokens."""
    store = store_of(world, 100)
    old = world.first_turn(np.random.default_rng(7), 320)
    store.put(old.context, old.layers)
    every = np.arange(0, 320, 16)
    runs = [
        ReusedRun(old.context, at, int(token), 1, np.zeros(1, dtype=np.bool_))
        for at, token in enumerate(every)
    ]
    context = world.context_of(old.context.ids[every])
    junk = world.layers_of(20, seed=8)
    assert store.put(context, junk, reused=runs)
    picked = [(keys[:, every], values[:, every]) for keys, values in old.layers]
    assert world.same(store, world.Turn(context, picked))
    store.remove([old.context])
    assert store.metrics()["memory_bytes"] == 2 * world.BLOCK_BYTES
    assert world.same(store, world.Turn(context, picked))


def test_a_source_that_is_gone_means_no_context(world: Any) -> None:
    store = store_of(world, 100)
    gone = world.first_turn(np.random.default_rng(9), 32)
    assert not store.put(world.context_of(range(32)), gone.layers, reused=[kept_all(gone)])
    assert store.metrics()["refused"] == 1 and store.contexts() == []


def test_slide_writes_least_for_agents_that_take_turns(tmp_path: Path, world: Any) -> None:
    """Eight sessions in turn, a quarter of them in memory; the same turns for every policy."""
    written, hits = {}, {}
    for eviction in EVICTIONS:
        rng = np.random.default_rng(10)
        store = store_of(world, 42, tmp_path / eviction.name, eviction=eviction)
        last: dict[int, Any] = {}
        for step in range(64):
            agent = step % 8
            if agent not in last:
                last[agent] = world.first_turn(rng, 320, f"s{agent}")
                assert store.put(last[agent].context, last[agent].layers)
                continue
            turn, given, runs = world.next_turn(rng, last[agent], 16, corrected=0.05, removed=16)
            with store.lease([last[agent].context]) as lease:
                assert world.same(store, last[agent])
                assert store.put(turn.context, given, reused=runs, lease=lease)
            last[agent] = turn
        written[eviction.name] = store.metrics()["ssd_write_bytes"]
        hits[eviction.name] = store.metrics()["misses"]
        store.close()
    assert hits == dict.fromkeys(hits, 0)
    assert written["slide"] * 2 < written["lru_write_back"] <= written["lru_write_through"]
