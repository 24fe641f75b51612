"""RagDatabase: the record of all files, uploads, vector stores and batches, in one SQLite file.

Indexes and working files are made from it and may be deleted. Every change is one transaction; a process that is
killed leaves the database as it was after the last one.
"""

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

from quire.core.errors import ConfigError, InvalidRequest, NotFound, StorageFull

# One entry per version of the schema; a database of an older version is migrated when it is opened.
MIGRATIONS = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
        filename TEXT NOT NULL, bytes INTEGER NOT NULL, purpose TEXT NOT NULL, created_at INTEGER NOT NULL,
        expires_at INTEGER);
    CREATE TABLE uploads (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
        filename TEXT NOT NULL, bytes INTEGER NOT NULL, purpose TEXT NOT NULL, created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL, status TEXT NOT NULL, file_seconds INTEGER, file_id TEXT);
    CREATE TABLE upload_parts (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, upload_id TEXT NOT NULL,
        bytes INTEGER NOT NULL, created_at INTEGER NOT NULL);
    CREATE INDEX parts_by_upload ON upload_parts (upload_id);
    CREATE TABLE stores (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
        name TEXT NOT NULL, description TEXT, metadata TEXT NOT NULL, created_at INTEGER NOT NULL,
        expires_days INTEGER, last_active_at INTEGER NOT NULL, model TEXT, width INTEGER);
    CREATE TABLE store_files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, store_id TEXT NOT NULL, batch_id TEXT,
        created_at INTEGER NOT NULL, status TEXT NOT NULL, error_code TEXT, error_message TEXT,
        attributes TEXT NOT NULL, max_tokens INTEGER NOT NULL, overlap INTEGER NOT NULL,
        usage_bytes INTEGER NOT NULL, is_parsed INTEGER NOT NULL, UNIQUE (store_id, id));
    CREATE INDEX store_files_by_status ON store_files (status, number);
    CREATE INDEX store_files_by_file ON store_files (id);
    CREATE INDEX store_files_by_batch ON store_files (batch_id);
    CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT, store_id TEXT NOT NULL, file_id TEXT NOT NULL,
        start INTEGER NOT NULL, end INTEGER NOT NULL, text TEXT NOT NULL, vectors BLOB);
    CREATE INDEX chunks_by_file ON chunks (store_id, file_id, id);
    CREATE INDEX chunks_to_embed ON chunks (id) WHERE vectors IS NULL;
    CREATE INDEX chunks_to_embed_by_file ON chunks (store_id, file_id) WHERE vectors IS NULL;
    CREATE TABLE file_batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, store_id TEXT NOT NULL,
        created_at INTEGER NOT NULL, is_cancelled INTEGER NOT NULL);
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, api TEXT NOT NULL,
        status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, body TEXT NOT NULL);
    CREATE INDEX batches_by_status ON batches (status);
    """,
    "ALTER TABLE stores ADD COLUMN index_is_stale INTEGER NOT NULL DEFAULT 0;",  # its index lacks a change
)


T = TypeVar("T")
# Dicts are kept as JSON. Columns that are not read as they are, by the type of their field.
sqlite3.register_adapter(dict, lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")))
_READ: dict[Any, Callable[[Any], Any]] = {dict: json.loads, bool: bool}


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which part of a list: at most `limit` entries, after or before the entry with an id, in an order."""

    limit: int = 20
    order: str = "desc"  # of creation: "asc" | "desc"
    after: str | None = None
    before: str | None = None


def new_id(kind: str) -> str:
    return f"{kind}{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


class RagDatabase:
    """Calls may come from any thread; each waits for the one before."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        try:
            self._connection = sqlite3.connect(
                path, check_same_thread=False, isolation_level=None, timeout=30
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._migrate(path)
        except sqlite3.Error as error:
            raise ConfigError(
                f"{path}: cannot be opened ({error}): give another --data-dir, or restore the file"
            ) from error

    def _migrate(self, path: Path) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise ConfigError(
                f"{path} has version {version} and this program knows {len(MIGRATIONS)}: use the program that made it"
            )
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            self._connection.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All changes within it, or none."""
        with self._lock:
            if self._connection.in_transaction:  # part of the one around it
                yield self._connection
                return
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as fault:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if isinstance(fault, sqlite3.OperationalError) and "full" in str(fault):
                    raise StorageFull(
                        f"the disk of --data-dir has no room ({fault}): delete files, or move the folder"
                    ) from fault
                raise

    def rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    def row(self, statement: str, *values: Any) -> sqlite3.Row | None:
        with self._lock:
            row: sqlite3.Row | None = self._connection.execute(statement, values).fetchone()
            return row

    def known(self, kind: type[T], what: str, object_id: str, statement: str, *values: Any) -> T:
        """The row that the statement selects; NotFound, of a `what` with that id, where there is none."""
        row = self.row(statement, *values)
        if row is None:
            raise NotFound.of(what, object_id)
        return record(kind, row)

    def change(self, statement: str, *values: Any) -> int:
        """Runs one statement as a transaction; returns how many rows it changed."""
        with self.transaction() as connection:
            return connection.execute(statement, values).rowcount

    def add(self, table: str, **values: Any) -> None:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        self.change(f"INSERT INTO {table} ({names}) VALUES ({marks})", *values.values())

    def page(
        self, kind: type[T], table: str, query: PageQuery, where: str, values: Sequence[Any], what: str
    ) -> tuple[list[T], bool]:
        """Entries of a table that `where` selects, in the order of their creation or the reverse; whether there are
        more."""
        conditions, parameters = [where], list(values)
        for field, cursor in (("after", query.after), ("before", query.before)):
            if cursor is None:
                continue
            at = self.row(f"SELECT number FROM {table} WHERE {where} AND id = ?", *values, cursor)
            if at is None:
                raise InvalidRequest(f"{field}={cursor[:80]!r} is no {what} of this list", field)
            is_later = (field == "after") == (query.order == "asc")
            conditions.append(f"number {'>' if is_later else '<'} ?")
            parameters.append(at["number"])
        backwards = query.before is not None and query.after is None  # the page ends at the cursor
        direction = "ASC" if (query.order == "asc") != backwards else "DESC"
        rows = self.rows(
            f"SELECT * FROM {table} WHERE {' AND '.join(conditions)} ORDER BY number {direction} LIMIT ?",
            *parameters,
            query.limit + 1,
        )
        shown = [record(kind, row) for row in rows[: query.limit]]
        return shown[::-1] if backwards else shown, len(rows) > query.limit

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def record(kind: type[T], row: sqlite3.Row) -> T:
    """A row as a dataclass whose fields are columns."""
    values = {}
    for name, field in kind.__dataclass_fields__.items():  # type: ignore[attr-defined]
        read = _READ.get(get_origin(field.type) or field.type)
        values[name] = row[name] if read is None else read(row[name])
    return kind(**values)
