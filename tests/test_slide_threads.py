"""A page store while its writer thread is in the middle of an extent: what others may do then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, current_thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages import PAGE_TOKENS, Lru, SlideStore
from cacheslide_agents.pages import host as host_module
from cacheslide_agents.pages.arena import Arena
from cacheslide_agents.pages.extents import HEADER_BYTES, Extents
from cacheslide_agents.pages.room import Room
from cacheslide_agents.pages.writer import Writer

BLOCKS = 16
WRITER = "cacheslide-writer"
A_WHILE_S = 0.5
"""Long enough for what is not held up to come to its end."""


@pytest.fixture(scope="module")
def world(support: Callable[[str], ModuleType]) -> Any:
    return support("page_world")


class HeldWriter:
    """The thread that writes ahead stops in the middle of an extent until `go_on` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.writing, self.go_on = Event(), Event()
        real = Extents.write

        def write(extents: Extents, *how: Any) -> Any:
            if current_thread().name == WRITER:
                self.writing.set()
                self.go_on.wait(10)
            return real(extents, *how)

        patch.setattr(Extents, "write", write)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWriter]:
    writer = HeldWriter(monkeypatch)
    yield writer
    writer.go_on.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def turn_of(world: Any, name: str, blocks: int) -> Any:
    rng = np.random.default_rng(ord(name[0]))
    return world.first_turn(rng, blocks * PAGE_TOKENS, name)


def opened(world: Any, path: Path, blocks: int = BLOCKS, **how: Any) -> SlideStore:
    return SlideStore(blocks * world.BLOCK_BYTES, path, **how)


def put_all(store: SlideStore, *turns: Any) -> None:
    for turn in turns:
        assert store.put(turn.context, turn.layers)


def written_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("rank-0/extents/*"))


def is_done_in_a_while(*futures: Future[Any]) -> bool:
    return not wait(futures, A_WHILE_S).not_done


class SlowToCount(int):
    """A number to which the writer thread cannot add until others had a while to do the same."""

    def __new__(cls, value: int, adding: Event, added: Event) -> SlowToCount:
        made = super().__new__(cls, value)
        made.adding, made.added = adding, added
        return made

    adding: Event
    added: Event

    def __add__(self, other: int) -> int:
        if current_thread().name == WRITER:
            self.adding.set()
            self.added.wait(A_WHILE_S)
        return int(self) + other


def test_two_threads_never_write_extents_of_one_number(tmp_path: Path, world: Any) -> None:
    adding, added = Event(), Event()
    pinned, other, new = (turn_of(world, *which) for which in (("a", 8), ("b", 8), ("c", 4)))
    with opened(world, tmp_path) as store:
        store._holdings.disk._next = SlowToCount(1, adding, added)  # type: ignore[union-attr]
        store.pin("a")  # so that it is not written ahead
        put_all(store, pinned, other)
        assert adding.wait(60)
        put_all(store, new)  # writes some of what is pinned
        added.set()
        store.flush()
        assert store.metrics()["write_failures"] == 0
        assert all(world.same(store, turn) for turn in (pinned, other, new))


def test_an_extent_under_way_counts_in_the_budget_on_ssd(
    tmp_path: Path, world: Any, held: HeldWriter, threads: ThreadPoolExecutor
) -> None:
    pinned, other, new = (turn_of(world, *which) for which in (("a", 8), ("b", 8), ("c", 4)))
    budget = 10 * world.BLOCK_BYTES + 2 * HEADER_BYTES
    with opened(world, tmp_path, disk_bytes=budget) as store:
        store.pin("a")
        put_all(store, pinned, other)
        assert held.writing.wait(60)
        put = threads.submit(store.put, new.context, new.layers)
        is_done_in_a_while(put)
        held.go_on.set()
        assert put.result(60)
        assert store.metrics()["ssd_bytes"] == written_of(tmp_path) <= budget
        assert all(world.same(store, turn) for turn in (pinned, other, new))


def test_a_write_that_failed_takes_no_budget(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = turn_of(world, "a", 8)
    budget = 8 * world.BLOCK_BYTES + HEADER_BYTES

    with opened(world, tmp_path, disk_bytes=budget, write_ahead=False) as store:
        put_all(store, turn)
        for error in (OSError("bad"), MemoryError("no memory")):
            with monkeypatch.context() as patched:
                patched.setattr(Extents, "write", lambda *_, error=error: raised(error))
                with pytest.raises((StoreError, MemoryError)):
                    store.flush()
        assert not any(block.busy for block in store._holdings.host.blocks)
        store.flush()
        assert written_of(tmp_path) == budget


def raised(error: Exception) -> Any:
    raise error


def test_gc_waits_for_the_extent_under_way_and_then_leaves_nothing_dead(
    tmp_path: Path, world: Any, held: HeldWriter, threads: ThreadPoolExecutor
) -> None:
    gone, kept, other = (turn_of(world, *which) for which in (("a", 4), ("b", 4), ("c", 8)))
    with opened(world, tmp_path, blocks=40, write_ahead=False) as store:
        put_all(store, gone, kept)
    with opened(world, tmp_path) as store:
        context = world.found_again(store, kept)
        assert store.remove([world.found_again(store, gone)]) == 1
        kept = world.Turn(context, kept.layers)
        assert world.same(store, kept)  # and in memory, where its next turn corrects it
        turn, given, runs = world.next_turn(np.random.default_rng(0), kept, 16, corrected=0.9)
        with store.lease([context]) as lease:
            assert store.put(turn.context, given, reused=runs, lease=lease)
        put_all(store, other)
        more = turn_of(world, "d", 3)
        put_all(store, more)
        assert held.writing.wait(60)
        collected = threads.submit(store.gc)
        assert not is_done_in_a_while(collected)
        held.go_on.set()
        collected.result(60)
        assert store.metrics()["ssd_dead_bytes"] == 0
        assert all(world.same(store, one) for one in (turn, other, more))


def test_a_store_that_is_closed_while_a_put_waits_says_so(
    tmp_path: Path,
    world: Any,
    held: HeldWriter,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those who wait for the extent under way, the one that closes is the first to go on."""
    first, new = turn_of(world, "a", BLOCKS), turn_of(world, "b", 4)
    store, closed, real = opened(world, tmp_path), Event(), Writer.wait

    def last(writer: Writer) -> bool:
        waited = real(writer)
        if waited:
            store._changed.release()
            assert closed.wait(60)
            store._changed.acquire()
        return waited

    monkeypatch.setattr(Writer, "wait", last)
    put_all(store, first)
    assert held.writing.wait(60)
    put = threads.submit(store.put, new.context, new.layers)
    assert not is_done_in_a_while(put)
    held.go_on.set()
    store.close()
    closed.set()
    with pytest.raises(StoreError, match="closed"):
        put.result(60)
    with opened(world, tmp_path, read_only=True) as again:
        context = world.found_again(again, first)
        assert world.same(again, world.Turn(context, first.layers))


def test_a_store_may_be_closed_by_the_thread_that_writes_ahead(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that thread happens to collect the last who needed the store."""
    real, asked = Extents.write, Event()
    first = turn_of(world, "a", BLOCKS)
    store = opened(world, tmp_path)

    def write(extents: Extents, *how: Any) -> Any:
        if current_thread().name == WRITER:
            store.close()
            asked.set()
        return real(extents, *how)

    monkeypatch.setattr(Extents, "write", write)
    put_all(store, first)
    assert asked.wait(10), "it waits for itself"
    store.close()
    with opened(world, tmp_path) as again:
        context = world.found_again(again, first)
        assert world.same(again, world.Turn(context, first.layers))


def test_two_threads_have_one_memory_for_one_kind_of_block(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    old, new = turn_of(world, "a", 4), turn_of(world, "b", 4)
    with opened(world, tmp_path) as store:
        put_all(store, old)
    making, made = Event(), Event()

    def slow(*what: Any, **how: Any) -> Arena:
        if not making.is_set():
            making.set()
            made.wait(A_WHILE_S)
        return Arena(*what, **how)

    with opened(world, tmp_path) as store:
        context = world.found_again(store, old)
        monkeypatch.setattr(host_module, "Arena", slow)
        loaded = threads.submit(store.load, context, 1)
        assert making.wait(60)
        put_all(store, new)
        made.set()
        assert loaded.result(60)[0].equal(old.layers[1][0])
        assert world.same(store, new)


def test_a_read_that_makes_room_does_not_drop_what_it_reads(tmp_path: Path, world: Any) -> None:
    old, new = turn_of(world, "a", 4), turn_of(world, "b", 4)
    how = {"eviction": Lru(), "disk_bytes": 4 * world.BLOCK_BYTES + HEADER_BYTES}
    with opened(world, tmp_path, 4, **how) as store:
        put_all(store, old)
    with opened(world, tmp_path, 4, write_ahead=False, **how) as store:
        old = world.Turn(world.found_again(store, old), old.layers)
        put_all(store, new)  # fills memory, and there is no room for it on SSD
        assert world.same(store, old)
        assert world.same(store, old)


def test_two_reads_that_wait_bring_a_block_to_memory_once(
    tmp_path: Path, world: Any, held: HeldWriter, threads: ThreadPoolExecutor
) -> None:
    old, new = turn_of(world, "a", 4), turn_of(world, "b", BLOCKS)
    with opened(world, tmp_path, write_ahead=False) as store:
        put_all(store, old)
    with opened(world, tmp_path, eviction=Lru()) as store:
        old = world.Turn(world.found_again(store, old), old.layers)
        put_all(store, new)
        assert held.writing.wait(60)
        loads = [threads.submit(store.load, old.context, 0) for _ in range(2)]
        assert not is_done_in_a_while(loads[0])
        held.go_on.set()
        assert all(load.result(60)[0].equal(old.layers[0][0]) for load in loads)
        assert world.same(store, old) and world.same(store, new)
        store.clear()
        assert store.metrics()["memory_bytes"] == 0


def put_side_by_side(
    store: SlideStore, held: HeldWriter, threads: ThreadPoolExecutor, turns: list[Any]
) -> None:
    """All of `turns` while a write is under way; they wait for its end, and are stored."""
    assert held.writing.wait(60)
    puts = [threads.submit(store.put, turn.context, turn.layers) for turn in turns]
    assert not is_done_in_a_while(*puts)
    held.go_on.set()
    assert all(put.result(60) for put in puts)


def test_two_puts_of_one_session_that_wait_leave_one_context(
    tmp_path: Path, world: Any, held: HeldWriter, threads: ThreadPoolExecutor
) -> None:
    filler = turn_of(world, "filler", BLOCKS)
    rng = np.random.default_rng(1)
    turns = [world.first_turn(rng, 4 * PAGE_TOKENS, "agent") for _ in range(2)]
    with opened(world, tmp_path) as store:
        put_all(store, filler)
        put_side_by_side(store, held, threads, turns)
        (stored,) = [turn for turn in turns if turn.context in store.contexts()]
        assert world.same(store, stored)


def test_a_quota_holds_for_puts_that_wait_side_by_side(
    tmp_path: Path, world: Any, held: HeldWriter, threads: ThreadPoolExecutor
) -> None:
    filler = turn_of(world, "filler", 12)
    rng = np.random.default_rng(2)
    turns = [world.first_turn(rng, 4 * PAGE_TOKENS, name) for name in "ab"]
    quota = 16 * world.BLOCK_BYTES
    with opened(world, tmp_path, 12, namespace_quota_bytes=quota) as store:
        put_all(store, filler)
        put_side_by_side(store, held, threads, turns)
        entries = store._holdings.catalog.entries()
        assert sum(entry.nbytes for entry in entries) <= quota
        assert {context.session for context in store.contexts()} == {"a", "b"}
        assert all(world.same(store, turn) for turn in turns)


def test_a_put_that_others_always_cross_gives_up(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever room was made for it, somebody has begun to read what had to go."""
    store, rng = SlideStore(100 * world.BLOCK_BYTES), np.random.default_rng(3)
    first = world.first_turn(rng, 40, "agent")
    assert store.put(first.context, first.layers)
    leases, real = [], Room.make

    def crossed(room: Room, *how: Any, **more: Any) -> bool:
        leases.append(store.lease([store.contexts()[-1]]))
        second = world.first_turn(rng, 40, "agent")
        monkeypatch.setattr(Room, "make", real)
        assert store.put(second.context, second.layers)
        monkeypatch.setattr(Room, "make", crossed)
        return real(room, *how, **more)

    monkeypatch.setattr(Room, "make", crossed)
    new = world.first_turn(rng, 40, "agent")
    assert not store.put(new.context, new.layers)
    assert store.metrics()["refused"] == 1
    monkeypatch.undo()
    assert world.same(store, first)
