"""A store in trouble: an SSD budget too small, cleaning up refused, and threads that cross."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from errno import EIO, ENOSPC
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages import PAGE_TOKENS, SlideStore
from cacheslide_agents.pages.extents import Extents
from cacheslide_agents.pages.index import Index


@pytest.fixture(scope="module")
def world(support: Callable[[str], ModuleType]) -> Any:
    return support("page_world")


def test_making_room_on_ssd_may_drop_what_is_still_to_be_written(
    tmp_path: Path, world: Any
) -> None:
    rng = np.random.default_rng(0)
    old, new = (world.first_turn(rng, PAGE_TOKENS * blocks, str(blocks)) for blocks in (150, 20))
    with SlideStore(
        200 * world.BLOCK_BYTES, tmp_path, disk_bytes=100 * world.BLOCK_BYTES, write_ahead=False
    ) as store:
        assert store.put(old.context, old.layers)
        assert store.put(new.context, new.layers)
        store.flush()  # the first 64 blocks of `old` are written, and go with it for the next 64
    with SlideStore(200 * world.BLOCK_BYTES, tmp_path, write_ahead=False) as store:
        assert world.found_again(store, old) is None
        context = world.found_again(store, new)
        assert world.same(store, world.Turn(context, new.layers))


def test_what_never_fits_on_ssd_pushes_nothing_off_it(tmp_path: Path, world: Any) -> None:
    rng = np.random.default_rng(1)
    small = [world.first_turn(rng, 4 * PAGE_TOKENS, f"s{at}") for at in range(4)]
    large = world.first_turn(rng, 60 * PAGE_TOKENS, "large")
    with SlideStore(
        100 * world.BLOCK_BYTES, tmp_path, disk_bytes=30 * world.BLOCK_BYTES, write_ahead=False
    ) as store:
        for turn in small:
            assert store.put(turn.context, turn.layers)
        store.flush()
        assert store.put(large.context, large.layers)
        with pytest.raises(StoreError, match="raise disk_bytes"):
            store.flush()
        assert world.same(store, large)
    with SlideStore(100 * world.BLOCK_BYTES, tmp_path, read_only=True) as store:
        found = [world.found_again(store, turn) for turn in small]
        for context, turn in zip(found, small, strict=True):
            assert world.same(store, world.Turn(context, turn.layers))


def test_an_index_that_cannot_be_written_is_named_rather_than_disk_bytes(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    first, second, new = (world.first_turn(rng, 10 * PAGE_TOKENS, name) for name in "abc")
    with SlideStore(
        100 * world.BLOCK_BYTES, tmp_path, disk_bytes=25 * world.BLOCK_BYTES, write_ahead=False
    ) as store:
        for turn in (first, second):
            assert store.put(turn.context, turn.layers)
            store.flush()
        assert store.put(new.context, new.layers)

        def refused(*_: Any) -> Any:
            raise OSError(ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Index, "commit", refused)
            for _ in range(3):
                with pytest.raises(StoreError, match=r"No space left on device; make room on the"):
                    store.flush()
        assert world.same(store, second)  # one had to go before the trouble showed, no others
        store.flush()
        assert world.same(store, new)
    with SlideStore(100 * world.BLOCK_BYTES, tmp_path, read_only=True) as store:
        for turn in (second, new):
            assert world.same(store, world.Turn(world.found_again(store, turn), turn.layers))


def test_a_budget_that_others_hold_is_named_although_an_earlier_write_failed(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    held, new = (world.first_turn(rng, 10 * PAGE_TOKENS, name) for name in "ab")
    with SlideStore(
        100 * world.BLOCK_BYTES, tmp_path, disk_bytes=15 * world.BLOCK_BYTES, write_ahead=False
    ) as store:
        assert store.put(held.context, held.layers)

        def failing(*_: Any) -> Any:
            raise OSError(EIO, "bad")

        with monkeypatch.context() as patched:
            patched.setattr(Extents, "write", failing)
            with pytest.raises(StoreError, match="bad; see that the folder can be written"):
                store.flush()
        store.flush()
        store.pin("a")
        assert store.put(new.context, new.layers)
        with pytest.raises(StoreError, match=r"only in memory: disk_bytes .*; raise disk_bytes$"):
            store.flush()
        assert world.same(store, held) and world.same(store, new)


def test_a_store_opens_although_it_cannot_be_cleaned_up(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = world.first_turn(np.random.default_rng(2), 40, "a")
    with SlideStore(8 * world.BLOCK_BYTES, tmp_path) as store:
        assert store.put(turn.context, turn.layers)
    stray = tmp_path / "rank-0" / "extents" / "0000000000ff.pages"
    stray.write_bytes(b"left by a crash")
    real = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == stray:
            raise PermissionError(1, "Operation not permitted")
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        with SlideStore(8 * world.BLOCK_BYTES, tmp_path) as store:
            again = world.found_again(store, turn)
            assert world.same(store, world.Turn(again, turn.layers))
            assert stray.exists()
    SlideStore(8 * world.BLOCK_BYTES, tmp_path).close()
    assert not stray.exists()


def test_an_opening_that_fails_leaves_the_folder_unlocked(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlideStore(8 * world.BLOCK_BYTES, tmp_path).close()
    with monkeypatch.context() as patched:
        patched.setattr(Extents, "numbers", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            SlideStore(8 * world.BLOCK_BYTES, tmp_path)
    SlideStore(8 * world.BLOCK_BYTES, tmp_path).close()


def test_what_another_thread_leased_while_a_put_waited_stays_as_it_is(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put waits for the extent under way, and lets go of the store meanwhile."""
    writing, go_on, waiting = Event(), Event(), Event()
    real, rng = Extents.write, np.random.default_rng(3)

    def slow(extents: Extents, *how: Any) -> Any:
        writing.set()
        assert go_on.wait(60)
        return real(extents, *how)

    monkeypatch.setattr(Extents, "write", slow)
    first = world.first_turn(rng, 8 * PAGE_TOKENS, "agent")
    filler = world.first_turn(rng, 8 * PAGE_TOKENS, "other")
    second, given, runs = world.next_turn(rng, first, 6 * PAGE_TOKENS, corrected=0.2)
    with SlideStore(16 * world.BLOCK_BYTES, tmp_path) as store, ThreadPoolExecutor(1) as thread:
        assert store.put(filler.context, filler.layers)
        assert store.put(first.context, first.layers)
        assert writing.wait(60)  # writes ahead; what it writes cannot leave memory now
        wait = store._changed.wait_for

        def watched(*how: Any) -> Any:
            waiting.set()
            return wait(*how)

        monkeypatch.setattr(store._changed, "wait_for", watched)
        put = thread.submit(store.put, second.context, given, None, runs)
        assert waiting.wait(60)
        with store.lease([first.context]):
            go_on.set()
            assert put.result(60)
            assert world.same(store, first)
        assert world.same(store, second)
