"""A page store that is short of room in both tiers, or whose memory fails in mid-put."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.errors import PageError
from cacheslide_agents.pages import PAGE_TOKENS, SlideStore
from cacheslide_agents.pages.packing import may_be_packed


@pytest.fixture
def world(support: Callable[[str], ModuleType]) -> ModuleType:
    return support("page_world")


def kept(store: SlideStore, world: ModuleType, turns: list[Any]) -> list[str]:
    """Sessions of `turns` that are stored; each gives back what it was given."""
    found = []
    for turn in turns:
        with suppress(PageError):
            assert world.same(store, turn), f"{turn.context.session} has another's keys"
            found.append(turn.context.session)
    return found


@pytest.mark.parametrize("disk_blocks", range(30, 46))
def test_a_context_dropped_for_room_on_ssd_takes_no_others_blocks_along(
    tmp_path: Path, world: ModuleType, disk_blocks: int
) -> None:
    """Making room for one block of a context may drop the whole of it, blocks in line as well."""
    rng = np.random.default_rng(0)
    sizes = (("a", 20), ("b", 20), ("c", 25))
    turns = [world.first_turn(rng, blocks * PAGE_TOKENS, name) for name, blocks in sizes]
    budgets = (30 * world.BLOCK_BYTES, tmp_path)
    disk_bytes = disk_blocks * world.BLOCK_BYTES + 4 * 4096
    with SlideStore(*budgets, disk_bytes=disk_bytes, write_ahead=False) as store:
        for turn in turns:
            assert store.put(turn.context, turn.layers)
        assert "c" in (before := kept(store, world, turns))
        assert not any(block.busy for block in store._holdings.host.blocks)
        store.flush()
        assert set(kept(store, world, turns)) <= set(before)
    with SlideStore(*budgets, disk_bytes=disk_bytes) as again:
        stored = {context.session: context for context in again.contexts()}
        assert stored
        for turn in turns:
            if turn.context.session in stored:
                back = world.Turn(stored[turn.context.session], turn.layers)
                assert world.same(again, back)


def test_memory_that_fails_in_mid_put_is_given_back(
    world: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    first, third = (world.first_turn(rng, 4 * PAGE_TOKENS, name) for name in "ac")
    with SlideStore(8 * world.BLOCK_BYTES) as store:
        assert store.put(first.context, first.layers)
        arena = next(iter(store._holdings.host.blocks)).geometry
        write = store._holdings.host.arena(arena).write

        def fails(*_: Any) -> None:
            raise MemoryError("no memory")

        for turn, given, runs in (
            (second := world.first_turn(rng, 2 * PAGE_TOKENS, "b"), second.layers, []),
            world.next_turn(rng, first, 5, corrected=0.3),
        ):
            monkeypatch.setattr(store._holdings.host.arena(arena), "write", fails)
            with pytest.raises(MemoryError), store.lease([]) as lease:
                store.put(turn.context, given, reused=runs, lease=lease)
            assert not any(block.busy for block in store._holdings.host.blocks)
            owners = {owner for block in store._holdings.host.blocks for owner in block.owners}
            assert owners == set(store._holdings.catalog.entries())
            monkeypatch.setattr(store._holdings.host.arena(arena), "write", write)
        assert store.put(third.context, third.layers)
        assert world.same(store, third)


def test_a_block_that_a_put_is_about_to_correct_keeps_its_rows_when_it_is_flushed(
    tmp_path: Path, world: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`put` lets others in while it waits for room; what it will write to must stay where it is."""
    rng = np.random.default_rng(2)
    first = world.first_turn(rng, 6 * PAGE_TOKENS, "a")
    with SlideStore(12 * world.BLOCK_BYTES, tmp_path, write_ahead=False) as store:
        assert store.put(first.context, first.layers)
        store.flush()
        second, given, runs = world.next_turn(rng, first, 3, corrected=0.05)
        assert store.put(second.context, given, reused=runs)
        assert any(may_be_packed(block) for block in store._holdings.host.blocks)
        third, given, runs = world.next_turn(rng, second, 3, corrected=0.6)
        make = store._room.make

        def waits(*arguments: Any, **options: Any) -> bool:
            store._changed.release()
            try:
                flushing = Thread(target=store.flush)
                flushing.start()
                flushing.join()
            finally:
                store._changed.acquire()
            return make(*arguments, **options)

        monkeypatch.setattr(store._room, "make", waits)
        assert store.put(third.context, given, reused=runs)
        monkeypatch.undo()
        assert world.same(store, third)
        store.flush()
    with SlideStore(12 * world.BLOCK_BYTES, tmp_path) as again:
        context = world.found_again(again, third)
        assert context is not None and world.same(again, world.Turn(context, third.layers))
