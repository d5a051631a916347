"""What lies on SSD: an SQLite database of extents and contexts.

In: rows to add and to delete, in one transaction. Out: all rows that are sound, once, at opening.
Every row carries a digest of its fields: SQLite does not notice a flipped bit.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from cacheslide_agents.chunks import Role, Span
from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages.base import ContextKey, StoredContext
from cacheslide_agents.pages.block import Place
from cacheslide_agents.pages.extents import Sums
from cacheslide_agents.pages.geometry import Geometry

log = logging.getLogger(__name__)
NAME = "index.sqlite"
FORMAT = 1
APPLICATION_ID = 0x43534C44
_TABLES = """
CREATE TABLE extents (number INTEGER PRIMARY KEY, geometry TEXT, blocks INTEGER, sums BLOB,
    digest BLOB);
CREATE TABLE contexts (row INTEGER PRIMARY KEY AUTOINCREMENT, told TEXT, ids BLOB, exact BLOB,
    places BLOB, block_of BLOB, row_of BLOB, digest BLOB);
"""
_EXTENT = ("number", "geometry", "blocks", "sums")
_CONTEXT = ("told", "ids", "exact", "places", "block_of", "row_of")


@dataclass(frozen=True)
class ExtentRow:
    number: int
    geometry: Geometry
    sums: Sums


@dataclass(frozen=True)
class ContextRow:
    """Token i is row `row_of[i]` of the block at `places[block_of[i]]`. `arrived` orders them."""

    context: StoredContext
    geometry: Geometry
    places: tuple[Place, ...]
    block_of: npt.NDArray[np.int64]
    row_of: npt.NDArray[np.int64]
    arrived: int
    row: int | None = None


class Index:
    """`damaged` counts the rows that were left out because they are not what was written."""

    def __init__(self, folder: Path, *, read_only: bool) -> None:
        self.path = folder / NAME
        self.damaged = 0
        self.read_only = read_only
        self._connection = self._open_as_it_is() if read_only else self._open_or_begin_anew()

    def _open_as_it_is(self) -> sqlite3.Connection:
        if not self.path.parent.is_dir():
            raise StoreError(f"there is no folder {self.path.parent}; check the path and rank")
        try:
            return self._open()
        except sqlite3.Error as error:
            raise StoreError(
                f"no page store can be read in {self.path.parent}: {error}; check the path and rank"
            ) from error

    def _open_or_begin_anew(self) -> sqlite3.Connection:
        """A database that is none is put aside: what it knew is lost, and counted as a miss."""
        try:
            return self._open()
        except sqlite3.OperationalError as error:
            raise StoreError(f"{self.path} cannot be opened for writing: {error}") from error
        except sqlite3.DatabaseError as error:
            log.warning(
                "%s cannot be read (%s); put aside, the store begins anew", self.path, error
            )
            self.damaged += 1
            for suffix in ("", "-wal", "-shm"):
                old = Path(f"{self.path}{suffix}")
                if old.exists():
                    old.rename(f"{old}.damaged")
            return self._open()

    def _open(self) -> sqlite3.Connection:
        if not self.read_only:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = self._connect()
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > FORMAT:
                raise StoreError(
                    f"{self.path} has format {version}, newer than the {FORMAT} this version of "
                    "cacheslide-agents reads; upgrade it or use another folder"
                )
            if not self.read_only:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                if version == 0:
                    connection.executescript(
                        f"BEGIN; {_TABLES} PRAGMA application_id = {APPLICATION_ID}; "
                        f"PRAGMA user_version = {FORMAT}; COMMIT;"
                    )
            (sound,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise sqlite3.DatabaseError(sound)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> sqlite3.Connection:
        if not self.read_only:
            return sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        uri = f"file:{quote(str(self.path))}?mode=ro"
        if not os.access(self.path.parent, os.W_OK, effective_ids=True):
            uri += "&immutable=1"  # a log would need a file beside it
        return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)

    def extents(self) -> list[ExtentRow]:
        return self._sound(_EXTENT, "extents", _to_extent)

    def contexts(self) -> list[ContextRow]:
        """Oldest first."""
        found = self._sound(_CONTEXT, "contexts", _to_context)
        return sorted(found, key=lambda row: row.arrived)

    def _sound(self, fields: tuple[str, ...], table: str, convert: Any) -> list[Any]:
        found: list[Any] = []
        query = f"SELECT rowid, digest, {', '.join(fields)} FROM {table} ORDER BY rowid"
        try:
            for row, digest, *values in self._connection.execute(query):
                try:
                    if digest != _digest(values):
                        raise ValueError("its digest is another")
                    found.append(convert(row, *values))
                except (ValueError, TypeError, KeyError) as error:
                    self.damaged += 1
                    log.warning("%s: row %s of %s left out: %s", self.path, row, table, error)
        except sqlite3.Error as error:
            self.damaged += 1
            log.warning("%s: the rest of %s cannot be read: %s", self.path, table, error)
        return found

    def commit(
        self,
        new_extents: Iterable[ExtentRow] = (),
        new_contexts: Iterable[ContextRow] = (),
        dead_extents: Iterable[int] = (),
        dead_contexts: Iterable[int] = (),
    ) -> list[int]:
        """All or nothing, on SSD when it returns; the new contexts' rows. `OSError` if refused."""
        run = self._connection.execute
        try:
            run("BEGIN IMMEDIATE")
            try:
                for number in dead_extents:
                    run("DELETE FROM extents WHERE number = ?", (number,))
                for row in dead_contexts:
                    run("DELETE FROM contexts WHERE row = ?", (row,))
                for extent in new_extents:
                    self._insert("extents", _EXTENT, _from_extent(extent))
                rows = [
                    self._insert("contexts", _CONTEXT, _from_context(context))
                    for context in new_contexts
                ]
                run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    run("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise OSError(f"{self.path} cannot be written: {error}") from error
        return rows

    def _insert(self, table: str, fields: tuple[str, ...], values: list[Any]) -> int:
        names, marks = ", ".join((*fields, "digest")), ", ".join("?" * (len(fields) + 1))
        cursor = self._connection.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})", [*values, _digest(values)]
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _digest(values: Iterable[Any]) -> bytes:
    import xxhash  # only files need it

    hashed = xxhash.xxh3_128()
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return hashed.digest()


def _from_extent(extent: ExtentRow) -> list[Any]:
    sums = extent.sums.astype("<u8")
    return [extent.number, extent.geometry.to_json(), sums.shape[1], sums.tobytes()]


def _to_extent(_: int, number: int, geometry: str, blocks: int, sums: bytes) -> ExtentRow:
    shape = Geometry.from_json(geometry)
    table = np.frombuffer(sums, dtype="<u8").reshape(shape.layers, blocks)
    return ExtentRow(number, shape, table.astype(np.uint64))


def _from_context(row: ContextRow) -> list[Any]:
    """Names go through JSON, which can spell whatever a caller made up, lone surrogates too."""
    context = row.context
    told = {
        "key": list(astuple(context.key)),
        "session": context.session,
        "isolated": context.isolated,
        "created": float(context.created),
        "arrived": row.arrived,
        "geometry": row.geometry.to_json(),
        "spans": [[s.id, s.role.value, s.start, s.stop, s.digest] for s in context.spans],
    }
    return [
        json.dumps(told),
        np.asarray(context.ids, dtype="<i8").tobytes(),
        np.asarray(context.exact, dtype=np.uint8).tobytes(),
        np.array(row.places, dtype="<i8").tobytes(),
        row.block_of.astype("<u4").tobytes(),
        row.row_of.astype("u1").tobytes(),
    ]


def _to_context(
    row: int, told: str, ids: bytes, exact: bytes, places: bytes, block_of: bytes, row_of: bytes
) -> ContextRow:
    facts = json.loads(told)
    context = StoredContext(
        key=ContextKey(*facts["key"]),
        ids=np.frombuffer(ids, dtype="<i8").astype(np.int64),
        exact=np.frombuffer(exact, dtype=np.uint8).astype(np.bool_),
        spans=tuple(Span(i, Role(r), a, b, d) for i, r, a, b, d in facts["spans"]),
        session=facts["session"],
        isolated=facts["isolated"],
        created=facts["created"],
    )
    pairs = np.frombuffer(places, dtype="<i8").reshape(-1, 2).tolist()
    return ContextRow(
        context,
        Geometry.from_json(facts["geometry"]),
        tuple(Place(extent, position) for extent, position in pairs),
        np.frombuffer(block_of, dtype="<u4").astype(np.int64),
        np.frombuffer(row_of, dtype="u1").astype(np.int64),
        facts["arrived"],
        row,
    )
