"""The SSD tier: what survives a restart, and what becomes of damage, refusals and odd clocks."""

from __future__ import annotations

import logging
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.errors import PageError, StoreError
from cacheslide_agents.pages import ContextKey, SlideStore

FLIPS = 500
NOBODY = 65534


@pytest.fixture(scope="module")
def world(support: Callable[[str], ModuleType]) -> Any:
    return support("page_world")


def open_store(path: Path, world: Any, blocks: int = 8, **how: Any) -> SlideStore:
    return SlideStore(blocks * world.BLOCK_BYTES, path, write_ahead=False, **how)


def filled(path: Path, world: Any, count: int = 6, **how: Any) -> list[Any]:
    """`count` sessions of 40 tokens each, more than 8 blocks hold, in a closed store."""
    rng = np.random.default_rng(0)
    turns = [world.first_turn(rng, 40, f"s{at}") for at in range(count)]
    with open_store(path, world, **how) as store:
        for turn in turns:
            assert store.put(turn.context, turn.layers)
    return turns


def answers(store: SlideStore, turns: list[Any], world: Any) -> list[str]:
    """For each turn: right, lost or, if ever, wrong."""
    outcomes = []
    for turn in turns:
        context = world.found_again(store, turn)
        try:
            right = context is not None and world.same(store, world.Turn(context, turn.layers))
            outcomes.append("lost" if context is None else "right" if right else "wrong")
        except PageError:
            outcomes.append("lost")
    return outcomes


def extents(path: Path) -> list[Path]:
    return sorted(path.glob("rank-0/extents/*.pages"))


def test_contexts_survive_a_restart_with_all_that_is_known_of_them(
    tmp_path: Path, world: Any
) -> None:
    rng = np.random.default_rng(1)
    key = ContextKey("model \ud800", "a tenant", "reflexion")
    spans = (world_span("a", 0, 10), world_span("b", 10, 40))
    ids = rng.integers(-(1 << 40), 1 << 40, 40)
    with open_store(tmp_path, world) as store:
        context = world.context_of(ids, "agent \U0001f600", key=key)
        flags = rng.random(40) < 0.5
        object.__setattr__(context, "exact", flags)
        object.__setattr__(context, "spans", spans)
        alone = world.context_of(ids[:20], key=key, isolated=True)
        for one in (context, alone):
            assert store.put(one, world.layers_of(len(one), 3))
    with open_store(tmp_path, world) as store:
        (again,) = store.find(key)
        assert (again.key, again.session, again.spans) == (key, "agent \U0001f600", spans)
        assert again.created == context.created and not again.isolated
        assert np.array_equal(again.ids, ids) and np.array_equal(again.exact, flags)
        assert world.same(store, world.Turn(again, world.layers_of(40, 3)))
        chunk = store.find_isolated(key, ids[:20])
        assert chunk is not None and world.same(store, world.Turn(chunk, world.layers_of(20, 3)))
        assert store.find(world.KEY) == []


def world_span(name: str, start: int, stop: int) -> Any:
    from cacheslide_agents.chunks import Role, Span

    return Span(name, Role.REUSE, start, stop, f"digest of {name}")


def test_what_is_on_ssd_only_is_loaded_part_by_part_and_promoted(
    tmp_path: Path, world: Any
) -> None:
    turns = filled(tmp_path, world)
    with open_store(tmp_path, world, blocks=4) as store:
        context = world.found_again(store, turns[0])
        keys, _ = store.load(context, 0, [(0, 10)])
        assert np.array_equal(keys, turns[0].layers[0][0][:, :10])
        page = world.BLOCK_BYTES // world.LAYERS
        assert store.metrics()["ssd_read_bytes"] == page, "one page holds these ten tokens"
        assert world.same(store, world.Turn(context, turns[0].layers))
        assert store.metrics()["ssd_read_bytes"] == 9 * page, "the tenth was in memory"
        assert world.same(store, world.Turn(context, turns[0].layers))
        assert store.metrics()["ssd_read_bytes"] == 9 * page
        assert answers(store, turns, world) == ["right"] * 6
        assert store.metrics()["memory_bytes"] <= 4 * world.BLOCK_BYTES


def test_a_context_larger_than_memory_is_read_past_it(tmp_path: Path, world: Any) -> None:
    turns = filled(tmp_path, world)
    with open_store(tmp_path, world, blocks=2) as store:
        assert answers(store, turns, world) == ["right"] * 6


def test_files_are_private_and_folders_too(tmp_path: Path, world: Any) -> None:
    before = os.umask(0)
    try:
        with open_store(tmp_path / "new" / "store", world) as store:
            turn = world.first_turn(np.random.default_rng(0), 40)
            store.put(turn.context, turn.layers)
            store.flush()
            files = [path for path in (tmp_path / "new" / "store").rglob("*") if path.is_file()]
            assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
            assert {path.name for path in files} >= {"index.sqlite", "index.sqlite-wal", "lock"}
    finally:
        os.umask(before)
    folders = [path for path in (tmp_path / "new" / "store").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_session_is_found_as_it_was_until_its_next_turn_is_on_ssd(
    tmp_path: Path, world: Any
) -> None:
    rng = np.random.default_rng(2)
    first = world.first_turn(rng, 60, "agent")
    store = open_store(tmp_path, world, blocks=20)
    store.put(first.context, first.layers)
    store.flush()
    second, given, runs = world.next_turn(rng, first, 10, corrected=0.5)
    with store.lease([first.context]) as lease:
        assert store.put(second.context, given, reused=runs, lease=lease)
    assert store.metrics()["memory_dirty_bytes"] > 0, "corrected in place"
    assert world.same(store, second)
    with open_store(tmp_path, world, read_only=True) as seen:
        assert answers(seen, [first, second], world) == ["right", "lost"]
    store.close()
    with open_store(tmp_path, world, read_only=True) as seen:
        assert answers(seen, [first, second], world) == ["lost", "right"]


def test_five_hundred_flipped_bytes_are_all_caught(
    tmp_path: Path, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    turns = filled(tmp_path, world, count=2)
    (file,) = extents(tmp_path)
    clean = file.read_bytes()
    rng = np.random.default_rng(3)
    places = rng.choice(np.arange(4096, len(clean)), FLIPS, replace=False)
    lost = 0
    for place in places:
        flipped = bytearray(clean)
        flipped[place] ^= int(rng.integers(1, 256))
        file.write_bytes(bytes(flipped))
        with open_store(tmp_path, world, read_only=True) as store:
            outcomes = answers(store, turns, world)
            lost += outcomes.count("lost")
            assert "wrong" not in outcomes
            assert store.metrics()["misses_torn"] == 1
    assert lost == FLIPS, "each byte belongs to one context"


def test_flipped_bytes_in_the_index_never_make_a_wrong_answer(
    tmp_path: Path, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    turns = filled(tmp_path, world)
    file = tmp_path / "rank-0" / "index.sqlite"
    clean = file.read_bytes()
    rng = np.random.default_rng(4)
    lost = 0
    for place in rng.integers(100, len(clean), 100):
        flipped = bytearray(clean)
        flipped[place] ^= int(rng.integers(1, 256))
        file.write_bytes(bytes(flipped))
        try:
            with open_store(tmp_path, world, read_only=True) as store:
                outcomes = answers(store, turns, world)
        except StoreError:
            outcomes = ["lost"] * len(turns)
        assert "wrong" not in outcomes
        lost += "lost" in outcomes
    assert lost > 10, "the index is where contexts stand"


@pytest.mark.parametrize("keep", [0, 4096, 5000, -1])
def test_a_truncated_file_is_a_miss(tmp_path: Path, world: Any, keep: int) -> None:
    turns = filled(tmp_path, world)
    file = extents(tmp_path)[0]
    os.truncate(file, keep if keep >= 0 else file.stat().st_size - 1)
    with open_store(tmp_path, world) as store:
        outcomes = answers(store, turns, world)
        assert "wrong" not in outcomes and "lost" in outcomes and "right" in outcomes
        assert store.metrics()["missing_extents"] == outcomes.count("lost")
    with open_store(tmp_path, world) as store:
        assert answers(store, turns, world) == outcomes and store.metrics()["missing_extents"] == 0


def test_files_that_vanish_or_shrink_under_an_open_store_are_misses(
    tmp_path: Path, world: Any
) -> None:
    turns = filled(tmp_path, world)
    first, second, *_ = extents(tmp_path)
    with open_store(tmp_path, world) as store:
        first.unlink()
        os.truncate(second, 5000)
        outcomes = answers(store, turns, world)
        assert "wrong" not in outcomes and outcomes.count("lost") >= 2
        assert store.metrics()["misses_torn"] >= 2
        turn = world.first_turn(np.random.default_rng(9), 40, "new")
        assert store.put(turn.context, turn.layers) and world.same(store, turn)


def test_extents_that_changed_places_are_foreign(tmp_path: Path, world: Any) -> None:
    turns = filled(tmp_path, world)
    first, second, *_ = extents(tmp_path)
    mine, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(mine)
    with open_store(tmp_path, world) as store:
        outcomes = answers(store, turns, world)
    assert "wrong" not in outcomes and "lost" in outcomes


@pytest.mark.parametrize("how", ["deleted", "garbage", "empty"])
def test_without_its_index_a_store_begins_anew(tmp_path: Path, world: Any, how: str) -> None:
    turns = filled(tmp_path, world)
    index = tmp_path / "rank-0" / "index.sqlite"
    index.unlink()
    if how != "deleted":
        index.write_bytes(b"" if how == "empty" else b"no database at all" * 400)
    with open_store(tmp_path, world) as store:
        assert answers(store, turns, world) == ["lost"] * 6
        assert extents(tmp_path) == [], "files that no index knows are removed"
        assert store.metrics()["damaged_rows"] == (how == "garbage")
    assert answers_after(filled(tmp_path, world), tmp_path, world) == ["right"] * 6


def answers_after(turns: list[Any], path: Path, world: Any) -> list[str]:
    with open_store(path, world) as store:
        return answers(store, turns, world)


@pytest.mark.parametrize("read_only", [False, True])
def test_an_index_from_a_newer_version_is_refused(
    tmp_path: Path, world: Any, read_only: bool
) -> None:
    turns = filled(tmp_path, world)
    with sqlite3.connect(tmp_path / "rank-0" / "index.sqlite") as index:
        index.execute("PRAGMA user_version = 2")
    index.close()
    with pytest.raises(StoreError, match="format 2, newer than the 1"):
        open_store(tmp_path, world, read_only=read_only)
    with sqlite3.connect(tmp_path / "rank-0" / "index.sqlite") as index:
        index.execute("PRAGMA user_version = 1")
    index.close()
    assert answers_after(turns, tmp_path, world) == ["right"] * 6, "nothing was touched"


def test_a_clock_that_went_back_makes_nothing_expire_or_sort_wrongly(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    with open_store(tmp_path, world, blocks=40, ttl_s=1000) as store:
        turns = [world.first_turn(rng, 20) for _ in range(3)]
        for turn, created in zip(turns, (9e9, 8e9, 7e9), strict=True):
            object.__setattr__(turn.context, "created", created)
            store.put(turn.context, turn.layers)
        newest_first = [turn.context for turn in reversed(turns)]
        assert store.find(world.KEY) == newest_first
    monkeypatch.setattr("cacheslide_agents.pages.holdings.time", lambda: 1000.0)
    with open_store(tmp_path, world, ttl_s=1000) as store:
        found = store.find(world.KEY)
        assert [c.ids.tolist() for c in found] == [c.ids.tolist() for c in newest_first]
    monkeypatch.setattr("cacheslide_agents.pages.holdings.time", lambda: 8e9 + 500)
    with open_store(tmp_path, world, ttl_s=1000) as store:
        assert len(store.find(world.KEY)) == 2, "the one of 7e9 is too old"


def test_a_second_writer_is_refused_by_name_and_readers_are_not(tmp_path: Path, world: Any) -> None:
    turns = filled(tmp_path, world)
    code = (
        "import sys; from cacheslide_agents.pages import SlideStore\n"
        "store = SlideStore(1000, sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    with other, other.stdin, other.stdout:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match=f"being written by process {other.pid}"):
            open_store(tmp_path, world)
        with open_store(tmp_path, world, rank=1) as beside:
            assert beside.contexts() == []
        with open_store(tmp_path, world, read_only=True) as store:
            assert answers(store, turns, world) == ["right"] * 6
            turn = world.first_turn(np.random.default_rng(0), 5)
            assert not store.put(turn.context, turn.layers)
            assert store.metrics()["refused"] == 1
        other.kill()
    assert answers_after(turns, tmp_path, world) == ["right"] * 6, "a killed writer's lock is gone"


def test_a_forked_child_does_not_write_beside_its_parent(tmp_path: Path, world: Any) -> None:
    with open_store(tmp_path, world) as store:
        turn = world.first_turn(np.random.default_rng(0), 40)
        store.put(turn.context, turn.layers)
        told = world.told_in_a_child(store.flush)
        assert f"opened by process {os.getpid()}, which forked" in told
        assert extents(tmp_path) == []
    assert answers_after([turn], tmp_path, world) == ["right"]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """The kernel refuses longer files, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_old_contexts_and_never_a_wrong_answer(
    tmp_path: Path, world: Any
) -> None:
    rng = np.random.default_rng(6)
    turns = [world.first_turn(rng, 40, f"s{at}") for at in range(6)]
    with open_store(tmp_path, world) as store:
        with no_file_longer_than(5000):
            for turn in turns:
                assert store.put(turn.context, turn.layers), "memory still takes the newest"
            assert answers(store, turns, world) == ["lost"] * 4 + ["right"] * 2
            with pytest.raises(StoreError, match="could not be written"):
                store.flush()
        assert extents(tmp_path) == [], "half-written files are removed"
        assert store.metrics()["write_failures"] > 0 and store.metrics()["evictions"] == 4
        store.flush()
    assert answers_after(turns, tmp_path, world) == ["lost"] * 4 + ["right"] * 2


def test_an_ssd_budget_is_kept_by_dropping_the_least_recently_used(
    tmp_path: Path, world: Any
) -> None:
    budget = 4 * (4096 + 3 * world.BLOCK_BYTES)
    rng = np.random.default_rng(7)
    turns = [world.first_turn(rng, 40, f"s{at}") for at in range(20)]
    with open_store(tmp_path, world, disk_bytes=budget) as store:
        for turn in turns:
            store.put(turn.context, turn.layers)
            assert sum(path.stat().st_size for path in extents(tmp_path)) <= budget
        outcomes = answers(store, turns, world)
    assert outcomes == sorted(outcomes), "the lost ones are the oldest"
    assert 3 <= outcomes.count("right") < 20


@contextmanager
def as_nobody(path: Path) -> Iterator[None]:
    """Root may write anywhere; the store's folder is given to another user, who may only read."""
    everything = [path, *path.rglob("*")]
    for one in everything:
        os.chmod(one, 0o500 if one.is_dir() else 0o400)
    root = os.geteuid() == 0
    if root:
        for one in everything:
            os.chown(one, NOBODY, NOBODY)
        parents = [parent for parent in path.parents if parent.stat().st_mode & 0o011 != 0o011]
        modes = [(parent, parent.stat().st_mode & 0o7777) for parent in parents]
        for parent, mode in modes:
            parent.chmod(mode | 0o011)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
            for parent, mode in modes:
                parent.chmod(mode)
        for one in everything:
            os.chmod(one, 0o700 if one.is_dir() else 0o600)


def test_a_read_only_folder_can_be_read_and_says_why_it_cannot_be_written(
    tmp_path: Path, world: Any
) -> None:
    path = tmp_path / "store"
    turns = filled(path, world)
    with as_nobody(path):
        with pytest.raises(StoreError, match="cannot be written: Permission denied"):
            open_store(path, world)
        with open_store(path, world, read_only=True) as store:
            assert answers(store, turns, world) == ["right"] * 6


def test_nothing_can_be_read_where_there_is_no_store(tmp_path: Path, world: Any) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        open_store(tmp_path, world, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_gc_gives_back_the_places_that_nobody_needs(tmp_path: Path, world: Any) -> None:
    turns = filled(tmp_path, world, count=12)
    with open_store(tmp_path, world) as store:
        gone = [world.found_again(store, turn) for turn in turns[::2]]
        assert store.remove(gone) == 6
        before = store.metrics()
        freed = store.gc()
        after = store.metrics()
        assert before["ssd_dead_bytes"] > 0 and after["ssd_dead_bytes"] == 0
        assert freed == before["ssd_bytes"] - after["ssd_bytes"] > 0
        assert sum(file.stat().st_size for file in extents(tmp_path)) == after["ssd_bytes"]
        assert answers(store, turns, world) == ["lost", "right"] * 6
    assert answers_after(turns, tmp_path, world) == ["lost", "right"] * 6


def test_a_cleared_store_leaves_no_page_on_ssd(tmp_path: Path, world: Any) -> None:
    turns = filled(tmp_path, world)
    with open_store(tmp_path, world) as store:
        store.clear()
        assert extents(tmp_path) == []
    assert answers_after(turns, tmp_path, world) == ["lost"] * 6


def test_ten_thousand_pages_are_found_again(tmp_path: Path, world: Any) -> None:
    rng = np.random.default_rng(8)
    with open_store(tmp_path, world, blocks=400) as store:
        for at in range(34):
            turn = world.first_turn(rng, 1600, f"s{at}")
            assert store.put(turn.context, turn.layers)
    with open_store(tmp_path, world) as store:
        assert len(store.contexts()) == 34
        shapes = store._holdings.disk.extents.values()  # type: ignore[union-attr]
        assert sum(geometry.layers * live for geometry, _, live in shapes) == 10_200
        assert store.metrics()["ssd_read_bytes"] == 0, "pages are read when they are asked for"
        assert answers(store, [turn], world) == ["right"]
