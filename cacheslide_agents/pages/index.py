"""What lies on SSD: an SQLite database of extents and contexts.

In: rows to add and to delete, in one transaction. Out: all rows that are sound, once, at opening.
Every row carries a digest of its fields: SQLite does not notice a flipped bit.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from cacheslide_agents.errors import StoreError
from cacheslide_agents.pages.rows import ContextRow, ExtentRow, digest_of
from cacheslide_agents.pages.trouble import told

log = logging.getLogger(__name__)
NAME = "index.sqlite"
FORMAT = 1
APPLICATION_ID = 0x43534C44
Row = TypeVar("Row", ExtentRow, ContextRow)
_TABLES = """
CREATE TABLE extents (number INTEGER PRIMARY KEY, geometry TEXT, blocks INTEGER, sums BLOB,
    digest BLOB);
CREATE TABLE contexts (row INTEGER PRIMARY KEY AUTOINCREMENT, told TEXT, ids BLOB, exact BLOB,
    places BLOB, block_of BLOB, row_of BLOB, digest BLOB);
"""


class Index:
    """`damaged` counts the rows that were left out because they are not what was written; the next
    commit deletes those in `unsound`. `whole`: whether no row is there that could not be read.
    """

    def __init__(self, folder: Path, *, read_only: bool) -> None:
        self.path = folder / NAME
        self.damaged = 0
        self.unsound: list[tuple[str, int]] = []
        self.whole = True
        self.read_only = read_only
        self._connection = self._open_as_it_is() if read_only else self._open_to_write()

    def _open_as_it_is(self) -> sqlite3.Connection:
        try:
            if not self.path.parent.is_dir():
                raise StoreError(f"there is no folder {self.path.parent}; check the path and rank")
            return self._open()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"no page store can be read in {self.path.parent}: {error}; check the path and rank"
            ) from error

    def _open_to_write(self) -> sqlite3.Connection:
        try:
            return self._open_or_begin_anew()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self.path} cannot be opened for writing: {told(error)}") from error

    def _open_or_begin_anew(self) -> sqlite3.Connection:
        """A database that is none is put aside: what it knew is lost, and counted as a miss."""
        try:
            return self._open()
        except sqlite3.OperationalError:
            raise
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
        connection.text_factory = _spelt
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
        uri = f"file:{quote(os.fsencode(self.path))}?mode=ro"
        if not os.access(self.path.parent, os.W_OK, effective_ids=True):
            uri += "&immutable=1"  # a log would need a file beside it
        return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)

    def extents(self) -> list[ExtentRow]:
        return self._sound(ExtentRow)

    def contexts(self) -> list[ContextRow]:
        """Oldest first."""
        return sorted(self._sound(ContextRow), key=lambda row: row.arrived)

    def _sound(self, kind: type[Row]) -> list[Row]:
        found: list[Row] = []
        query = f"SELECT rowid, digest, {', '.join(kind.FIELDS)} FROM {kind.TABLE} ORDER BY rowid"
        try:
            for row, digest, *values in self._connection.execute(query):
                try:
                    if digest != digest_of(values):
                        raise ValueError("its digest is another")
                    found.append(kind.read(row, *values))
                except (ValueError, TypeError, KeyError) as error:
                    self.damaged += 1
                    self.unsound.append((kind.TABLE, row))
                    log.warning("%s: row %s of %s left out: %s", self.path, row, kind.TABLE, error)
        except sqlite3.Error as error:
            self.damaged += 1
            self.whole = False
            log.warning("%s: the rest of %s cannot be read: %s", self.path, kind.TABLE, error)
        return found

    def commit(
        self,
        new_extents: Iterable[ExtentRow] = (),
        new_contexts: Iterable[ContextRow] = (),
        dead_extents: Iterable[int] = (),
        dead_contexts: Iterable[int] = (),
    ) -> list[int]:
        """All or nothing, on SSD when it returns; the new contexts' rows. `OSError` if refused.

        Rows that are not sound go with it, and never stand in the way of a new extent's number.
        """
        run = self._connection.execute
        try:
            run("BEGIN IMMEDIATE")
            try:
                for table, row in self.unsound:
                    run(f"DELETE FROM {table} WHERE rowid = ?", (row,))
                for number in dead_extents:
                    run("DELETE FROM extents WHERE number = ?", (number,))
                for row in dead_contexts:
                    run("DELETE FROM contexts WHERE row = ?", (row,))
                for extent in new_extents:
                    self._insert(extent)
                rows = [self._insert(context) for context in new_contexts]
                run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    run("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise OSError(f"{self.path} cannot be written: {error}") from error
        self.unsound.clear()
        return rows

    def _insert(self, new: ExtentRow | ContextRow) -> int:
        values = new.values()
        names, marks = ", ".join((*new.FIELDS, "digest")), ", ".join("?" * (len(values) + 1))
        cursor = self._connection.execute(
            f"INSERT OR REPLACE INTO {new.TABLE} ({names}) VALUES ({marks})",
            [*values, digest_of(values)],
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def close(self) -> None:
        self._connection.close()


def _spelt(text: bytes) -> str:
    """Damaged text too: its digest then tells, and only its own row is lost."""
    return text.decode("utf-8", "surrogateescape")
