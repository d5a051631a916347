"""What the operating system refuses: writing, reading, locking, looking; and odd places."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cacheslide_agents.errors import PageError, StoreError
from cacheslide_agents.pages import PAGE_TOKENS, ReusedRun, SlideStore
from cacheslide_agents.pages.audit import audit
from cacheslide_agents.pages.disk import Disk
from cacheslide_agents.pages.extents import Extents
from cacheslide_agents.pages.geometry import Geometry
from cacheslide_agents.pages.index import Index
from cacheslide_agents.pages.rows import ContextRow, ExtentRow

NAMES = ["s0", "s1", "s2"]


@pytest.fixture(scope="module")
def world(support: Callable[[str], ModuleType]) -> Any:
    return support("page_world")


@pytest.fixture
def turns(tmp_path: Path, world: Any) -> list[Any]:
    """Three sessions of 40 tokens, an extent of three blocks each, in a closed store."""
    rng = np.random.default_rng(0)
    made = [world.first_turn(rng, 40, name) for name in NAMES]
    with opened(tmp_path, world) as store:
        for turn in made:
            assert store.put(turn.context, turn.layers)
            store.flush()
    return made


def opened(path: Path, world: Any, blocks: int = 40, **how: Any) -> SlideStore:
    return SlideStore(blocks * world.BLOCK_BYTES, path, write_ahead=False, **how)


def extents(path: Path) -> list[Path]:
    return sorted(path.glob("rank-0/extents/*.pages"))


def right(path: Path, turns: list[Any], world: Any) -> list[str]:
    """Sessions that a reader finds, as they were put."""
    with opened(path, world, read_only=True) as store:
        return right_in(store, turns, world)


def right_in(store: SlideStore, turns: list[Any], world: Any) -> list[str]:
    found = [(turn, world.found_again(store, turn)) for turn in turns]
    return [
        turn.context.session
        for turn, context in found
        if context is not None and world.same(store, world.Turn(context, turn.layers))
    ]


def damaged_rows(store: SlideStore) -> float:
    return store.metrics()["damaged_rows"]


@contextmanager
def editing(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path / "rank-0" / "index.sqlite")) as index, index:
        yield index


@contextmanager
def refusing(
    target: Any, name: str, number: int, *, after: int = 0, where: Callable[..., bool] | None = None
) -> Iterator[list[Any]]:
    """Calls of `target.name` past the first `after`, of those that `where` picks, are refused."""
    calls: list[Any] = []
    real = getattr(target, name)

    def refused(*given: Any, **named: Any) -> Any:
        if where is None or where(*given):
            calls.append(given)
            if len(calls) > after:
                raise OSError(number, os.strerror(number))
        return real(*given, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target, name, refused)
        yield calls


def of_extent(path: Path) -> Callable[..., bool]:
    return lambda file, *_: os.readlink(f"/proc/self/fd/{file}") == str(path)


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_what_cannot_be_removed_is_told_and_goes_with_the_next_commit(
    tmp_path: Path, world: Any, turns: list[Any], how: str
) -> None:
    def removed(store: SlideStore) -> None:
        store.clear() if how == "clear" else store.remove(store.contexts())

    with refusing(Index, "commit", errno.ENOSPC), opened(tmp_path, world) as store:
        with pytest.raises(StoreError, match=r"again at the next opening: .*; make room on the"):
            removed(store)
        assert store.contexts() == []
    assert right(tmp_path, turns, world) == NAMES
    with opened(tmp_path, world) as store:
        with refusing(Index, "commit", errno.ENOSPC), pytest.raises(StoreError):
            removed(store)
        assert len(extents(tmp_path)) == 3
        store.flush()
        assert extents(tmp_path) == []
    assert right(tmp_path, turns, world) == []


@pytest.fixture
def half_dead(tmp_path: Path, world: Any) -> list[Any]:
    """Two extents of two contexts each, of which one is removed."""
    rng = np.random.default_rng(1)
    made = [world.first_turn(rng, 40, name) for name in "abcd"]
    with opened(tmp_path, world) as store:
        for pair in (made[:2], made[2:]):
            for turn in pair:
                assert store.put(turn.context, turn.layers)
            store.flush()
        assert len(extents(tmp_path)) == 2
        assert store.remove([made[0].context, made[2].context]) == 2
    return [made[1], made[3]]


def test_gc_says_that_the_index_cannot_be_written_and_stops(
    tmp_path: Path, world: Any, half_dead: list[Any]
) -> None:
    with opened(tmp_path, world) as store:
        with refusing(Index, "commit", errno.ENOSPC) as commits:
            with pytest.raises(StoreError, match=r"not all compacted: .*; make room on the disk"):
                store.gc()
            assert len(commits) == 1 and len(extents(tmp_path)) == 3
            with pytest.raises(StoreError, match=r"nothing was compacted: .*; make room on the"):
                store.gc()
        before = sum(file.stat().st_size for file in extents(tmp_path))
        freed = store.gc()
        assert freed == before - sum(file.stat().st_size for file in extents(tmp_path)) > 0
        assert store.metrics()["ssd_dead_bytes"] == 0
    assert right(tmp_path, half_dead, world) == ["b", "d"]


def test_gc_says_which_writes_were_refused_and_does_the_others(
    tmp_path: Path, world: Any, half_dead: list[Any]
) -> None:
    def first(_: Any, number: int, *__: Any) -> bool:
        return number == 3

    with opened(tmp_path, world) as store:
        with (
            refusing(Extents, "write", errno.ENOSPC, where=first),
            pytest.raises(StoreError, match=r"not all compacted: .*; make room on the disk"),
        ):
            store.gc()
        assert store.metrics()["ssd_dead_bytes"] == 3 * world.BLOCK_BYTES
        assert store.gc() == 3 * world.BLOCK_BYTES
    assert right(tmp_path, half_dead, world) == ["b", "d"]


def test_making_room_goes_on_without_what_cannot_be_compacted(
    tmp_path: Path, world: Any, half_dead: list[Any]
) -> None:
    size = sum(file.stat().st_size for file in extents(tmp_path))
    new = world.first_turn(np.random.default_rng(2), 40, "new")
    with opened(tmp_path, world, disk_bytes=size) as store:
        assert store.put(new.context, new.layers)
        with refusing(Extents, "write", errno.EIO, where=lambda _, number, *__: number > 3) as no:
            store.flush()  # as extent 3
        assert len(no) == 2
    assert "new" in right(tmp_path, [*half_dead, new], world)


def test_a_forked_child_does_not_remove_beside_its_parent(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    with opened(tmp_path, world) as store:
        told = world.told_in_a_child(lambda: store.remove(store.contexts()))
        assert f"opened by process {os.getpid()}, which forked" in told
        assert right(tmp_path, turns, world) == NAMES
        assert right_in(store, turns, world) == NAMES


def test_a_high_bit_in_a_contexts_text_costs_that_context_only(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    with editing(tmp_path) as index:
        (told,) = index.execute("SELECT told FROM contexts WHERE row = 2").fetchone()
        flipped = told.encode()[:20] + bytes([told.encode()[20] ^ 0x80]) + told.encode()[21:]
        index.execute("UPDATE contexts SET told = CAST(? AS TEXT) WHERE row = 2", (flipped,))
    with opened(tmp_path, world, read_only=True) as store:
        assert right_in(store, turns, world) == ["s0", "s2"]
        assert damaged_rows(store) == 1
    with opened(tmp_path, world) as store:
        assert right_in(store, turns, world) == ["s0", "s2"]
        assert len(extents(tmp_path)) == 2
    with opened(tmp_path, world) as store:
        assert right_in(store, turns, world) == ["s0", "s2"]
        assert damaged_rows(store) == 0, "what is damaged goes"


def test_a_damaged_row_goes_though_nothing_else_has_to(
    tmp_path: Path, world: Any, half_dead: list[Any]
) -> None:
    both = world.first_turn(np.random.default_rng(8), 40, "e")
    with opened(tmp_path, world) as store:
        keep = half_dead[0]
        flags = np.zeros(40, dtype=np.bool_)
        source = world.found_again(store, keep)
        copy = world.context_of(both.context.ids, "e")
        assert store.put(copy, keep.layers, reused=[ReusedRun(source, 0, 0, 40, flags)])
    with editing(tmp_path) as index:
        (row,) = index.execute("SELECT max(row) FROM contexts").fetchone()
        index.execute("UPDATE contexts SET exact = x'00' WHERE row = ?", (row,))
    opened(tmp_path, world).close()
    with opened(tmp_path, world, read_only=True) as store:
        assert right_in(store, half_dead, world) == ["b", "d"] and damaged_rows(store) == 0


def test_a_high_bit_in_an_extents_text_costs_its_contexts_only_and_its_number_is_free(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    with editing(tmp_path) as index:
        index.execute("UPDATE extents SET geometry = CAST(x'7bff7d' AS TEXT) WHERE number = 3")
    with opened(tmp_path, world) as store:
        assert right_in(store, turns, world) == ["s0", "s1"]
        assert damaged_rows(store) == 1 and len(extents(tmp_path)) == 2
    with opened(tmp_path, world) as store:
        assert damaged_rows(store) == 0
        assert store.put(turns[2].context, turns[2].layers)
        store.flush()
        assert extents(tmp_path)[-1].name == "000000000003.pages"
    assert right(tmp_path, turns, world) == NAMES


def test_a_row_that_was_not_read_does_not_stand_in_the_way_of_its_number(tmp_path: Path) -> None:
    shape = Geometry(1, 1, 1, "float32")
    old, new = (ExtentRow(1, shape, np.full((1, 1), n, dtype=np.uint64)) for n in (7, 8))
    with closing(Index(tmp_path, read_only=False)) as index:
        index.commit([old])
        index.commit([new])
        (row,) = index.extents()
        assert row.sums.tolist() == [[8]]


@contextmanager
def ending_early(kind: type[ContextRow] | type[ExtentRow]) -> Iterator[None]:
    """The index can be read up to the second row of that kind."""
    real, count = kind.read, iter(range(9))

    def read(*values: Any) -> Any:
        if next(count):
            raise sqlite3.OperationalError("disk I/O error")
        return real(*values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, "read", read)
        yield


@pytest.mark.parametrize("kind", [ContextRow, ExtentRow])
def test_what_an_index_did_not_tell_is_not_removed(
    tmp_path: Path, world: Any, turns: list[Any], kind: Any
) -> None:
    new = world.first_turn(np.random.default_rng(3), 40, "new")
    with ending_early(kind), opened(tmp_path, world) as store:
        assert right_in(store, turns, world) == ["s0"]
        assert len(extents(tmp_path)) == 3 and store.metrics()["spared_extents"] == 3
        assert store.put(new.context, new.layers)
        store.flush()
        assert store.remove([world.found_again(store, turns[0])]) == 1
        assert store.gc() == 0
        assert len(extents(tmp_path)) == 4
    with opened(tmp_path, world) as store:
        assert right_in(store, [*turns, new], world) == ["s1", "s2", "new"]
        assert len(extents(tmp_path)) == 3, "what nobody needs goes now"


def test_extents_that_are_not_removed_are_neither_compacted_nor_do_contexts_go_for_them(
    tmp_path: Path, world: Any, half_dead: list[Any]
) -> None:
    size = sum(file.stat().st_size for file in extents(tmp_path))
    new = world.first_turn(np.random.default_rng(4), 200, "new")
    with ending_early(ContextRow), opened(tmp_path, world, disk_bytes=size) as store:
        assert store.gc() == 0 and len(extents(tmp_path)) == 2
        assert store.put(new.context, new.layers)
        with pytest.raises(StoreError, match="raise disk_bytes"):
            store.flush()
        assert right_in(store, [*half_dead, new], world) == ["b", "new"]
    assert right(tmp_path, half_dead, world) == ["b", "d"]


def test_an_extent_that_cannot_be_looked_at_stays_for_another_opening(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    second = extents(tmp_path)[1]
    with (
        refusing(Path, "stat", errno.ESTALE, where=lambda path, *_: path == second),
        opened(tmp_path, world) as store,
    ):
        assert right_in(store, turns, world) == ["s0", "s2"]
        assert store.metrics()["missing_extents"] == store.metrics()["spared_extents"] == 1
        store.clear()
    assert extents(tmp_path) == [second]
    assert right(tmp_path, turns, world) == ["s1"]


def test_a_folder_that_cannot_be_listed_costs_nothing(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    new = world.first_turn(np.random.default_rng(5), 40, "new")
    with refusing(Extents, "numbers", errno.EIO), opened(tmp_path, world) as store:
        assert store.put(new.context, new.layers)
    assert right(tmp_path, [*turns, new], world) == [*NAMES, "new"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_page_that_cannot_be_read_is_named_and_its_contexts_are_lost(
    tmp_path: Path, world: Any, turns: list[Any], number: int
) -> None:
    second = extents(tmp_path)[1]
    with (
        refusing(os, "preadv", number, where=of_extent(second)),
        opened(tmp_path, world, read_only=True) as store,
    ):
        context = world.found_again(store, turns[1])
        with pytest.raises(PageError) as caught:
            store.load(context, 0)
        assert str(second) in str(caught.value) and os.strerror(number) in str(caught.value)
        assert world.found_again(store, turns[1]) is None
        assert store.metrics()["misses_torn"] == 1
        assert right_in(store, turns, world) == ["s0", "s2"]


def test_an_extent_of_its_size_in_the_place_of_another_is_no_torn_one(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    first, second, third = extents(tmp_path)
    second.write_bytes(third.read_bytes())
    damaged = bytearray(first.read_bytes())
    damaged[-1] ^= 1
    first.write_bytes(damaged)
    told = []
    with opened(tmp_path, world, read_only=True) as store:
        for turn in turns[:2]:
            context = world.found_again(store, turn)
            with pytest.raises(PageError) as caught:
                store.load(context, world.LAYERS - 1)
            told.append(str(caught.value))
        assert right_in(store, turns, world) == ["s2"]
    assert told == [
        f"extent {first} is torn: page 2 of layer 2 does not have its checksum",
        f"extent {second} is another file than was written there: page 0 of layer 2 does not have "
        "its checksum",
    ]


def is_pages(path: Any, *_: Any) -> bool:
    return str(path).endswith(".pages")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_this_process_is_short_of_loses_no_context(
    tmp_path: Path, world: Any, turns: list[Any], number: int
) -> None:
    with opened(tmp_path, world, read_only=True) as store:
        with refusing(os, "open", number, where=is_pages):
            context = world.found_again(store, turns[0])
            with pytest.raises(OSError, match=os.strerror(number)) as caught:
                store.load(context, 0)
            assert caught.value.errno == number
            assert caught.value.filename == str(extents(tmp_path)[0])
        assert right_in(store, turns, world) == NAMES


@pytest.mark.parametrize(
    ("number", "told"), [(errno.EIO, "see that its disk is well"), (errno.EMFILE, "ulimit -n")]
)
def test_an_audit_goes_on_past_what_cannot_be_read(
    tmp_path: Path, turns: list[Any], number: int, told: str
) -> None:
    _, second, third = extents(tmp_path)
    data = bytearray(third.read_bytes())
    data[-1] ^= 1
    third.write_bytes(bytes(data))
    disk = Disk(tmp_path, read_only=True)
    with refusing(os, "open", number, where=lambda path, *_: path == second):
        faults = list(audit(disk))
    disk.close()
    layers = [(2, layer, position) for layer in range(3) for position in range(3)]
    assert [(f.extent, f.layer, f.position) for f in faults] == [*layers, (3, 2, 2)]
    assert all(
        str(second) in fault.what and os.strerror(number) in fault.what and told in fault.what
        for fault in faults[:-1]
    )
    assert "is torn" in faults[-1].what


def test_a_source_that_is_torn_when_it_is_copied_is_lost(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    first = extents(tmp_path)[0]
    with (
        refusing(os, "preadv", errno.EIO, where=of_extent(first)),
        opened(tmp_path, world) as store,
    ):
        sources = [world.found_again(store, turn) for turn in turns]
        no = np.zeros(1, dtype=np.bool_)
        runs = [
            ReusedRun(source, 3 * at + row, row * PAGE_TOKENS, 1, no)
            for at, source in enumerate(sources)
            for row in range(3)
        ]
        new = world.context_of(range(9), "new")
        with pytest.raises(PageError, match="cannot be read"):
            store.put(new, world.layers_of(9), reused=runs)
        assert right_in(store, turns, world) == ["s1", "s2"]
        assert store.metrics()["misses_torn"] == 1


def test_an_extent_whose_folder_cannot_be_synced_leaves_no_file(
    tmp_path: Path, world: Any, turns: list[Any]
) -> None:
    def is_folder(file: int) -> bool:
        return os.path.isdir(f"/proc/self/fd/{file}")

    new = world.first_turn(np.random.default_rng(6), 40, "new")
    with opened(tmp_path, world) as store:
        assert store.put(new.context, new.layers)
        with refusing(os, "fsync", errno.EIO, where=is_folder):
            with pytest.raises(StoreError, match="only in memory"):
                store.flush()
            assert len(extents(tmp_path)) == 3


@pytest.mark.parametrize("name", [b"caf\xe9", b"a?b#c%41", "über".encode()])
def test_a_path_of_any_bytes_can_be_read(tmp_path: Path, world: Any, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    turn = world.first_turn(np.random.default_rng(7), 40, "s")
    with opened(path, world) as store:
        assert store.put(turn.context, turn.layers)
    assert right(path, [turn], world) == ["s"]


def test_an_index_that_is_a_folder_is_refused_with_the_mend(tmp_path: Path, world: Any) -> None:
    index = tmp_path / "rank-0" / "index.sqlite"
    index.mkdir(parents=True)
    with pytest.raises(StoreError, match=r"index\.sqlite cannot be opened .*; move the folder of"):
        opened(tmp_path, world)
    with pytest.raises(StoreError, match="no page store can be read in"):
        opened(tmp_path, world, read_only=True)
    index.rmdir()
    opened(tmp_path, world).close()


@pytest.mark.parametrize(
    ("number", "mend"),
    [(errno.ENOSPC, "make room on the disk"), (errno.EACCES, "see that the folder can be written")],
)
def test_an_index_that_cannot_be_made_is_refused_with_the_mend(
    tmp_path: Path, world: Any, number: int, mend: str
) -> None:
    def is_index(path: Any, *_: Any) -> bool:
        return str(path).endswith("index.sqlite")

    with (
        refusing(os, "open", number, where=is_index),
        pytest.raises(StoreError, match=f"{os.strerror(number)}; {mend}"),
    ):
        opened(tmp_path, world)
    opened(tmp_path, world).close()


def test_a_damaged_index_that_cannot_be_put_aside_is_refused(tmp_path: Path, world: Any) -> None:
    folder = tmp_path / "rank-0"
    (folder / "index.sqlite.damaged").mkdir(parents=True)
    (folder / "index.sqlite").write_bytes(b"no database at all" * 400)
    with pytest.raises(StoreError, match=r"cannot be opened for writing: .*; move the folder of"):
        opened(tmp_path, world)
    (folder / "index.sqlite.damaged").rmdir()
    with opened(tmp_path, world) as store:
        assert damaged_rows(store) == 1


def test_a_name_too_long_for_a_folder_is_a_store_that_cannot_be_read(
    tmp_path: Path, world: Any
) -> None:
    with pytest.raises(StoreError, match=r"File name too long.*; check the path and rank"):
        opened(tmp_path / ("x" * 300), world, read_only=True)


def test_a_folder_that_a_full_disk_refuses_is_told_as_that(tmp_path: Path, world: Any) -> None:
    with (
        refusing(Path, "mkdir", errno.ENOSPC),
        pytest.raises(StoreError, match="No space left on device; make room on the disk, use"),
    ):
        opened(tmp_path, world)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_lock_is_told_from_a_second_writer(
    tmp_path: Path, world: Any, number: int
) -> None:
    lock = tmp_path / "rank-0" / "lock"
    with refusing(fcntl, "flock", number), pytest.raises(StoreError) as caught:
        opened(tmp_path, world)
    told = str(caught.value)
    assert told.startswith(f"{lock} cannot be locked: {os.strerror(number)}; the file system")
    assert "being written" not in told
    with opened(tmp_path, world), pytest.raises(StoreError, match="written by process"):
        opened(tmp_path, world)
