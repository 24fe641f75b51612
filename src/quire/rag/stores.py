"""VectorStores: stores, the files in them, their chunks with vectors, and the index of each.

The database is the record. An index answers which chunks fit; what it names is looked up in the database, and only
chunks of completed files count. An index that does not hold exactly those is built again.
"""

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from quire.core.errors import InvalidRequest
from quire.observe.logs import get_logger
from quire.rag.chunks import Chunk, WaitingChunk
from quire.rag.database import PageQuery, RagDatabase, new_id, now, record
from quire.rag.index import StoreIndexes
from quire.rag.qdrant_server import StoreUnreachable
from quire.rag.ranking import IndexQuery, Point, VectorIndex

log = get_logger(__name__)
MAX_OPEN = 64  # indexes; the least recently used is closed
MAX_STORE_FILES = 10_000  # of one store
ACTIVE_SECONDS = 60  # a search notes that a store is used at most this often
REBUILT_AT_ONCE = 1000  # chunks
COUNTS = ("in_progress", "completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class VectorStore:
    id: str
    owner: str
    name: str
    description: str | None
    metadata: dict[str, str]
    created_at: int
    expires_days: int | None
    last_active_at: int
    model: str | None  # the encoder of its vectors; None until a file is embedded
    width: int | None  # numbers in a vector

    @property
    def expires_at(self) -> int | None:
        return None if self.expires_days is None else self.last_active_at + 86400 * self.expires_days

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= now()


@dataclass(frozen=True, slots=True)
class StoreFile:
    id: str  # the file's
    store_id: str
    batch_id: str | None
    created_at: int
    status: str  # in_progress | completed | failed | cancelled
    error_code: str | None
    error_message: str | None
    attributes: dict[str, Any]
    max_tokens: int  # of a chunk
    overlap: int
    usage_bytes: int
    is_parsed: bool  # its chunks are in the database


@dataclass(frozen=True, slots=True)
class NewStoreFile:
    """A file to be added to a store."""

    file_id: str
    attributes: dict[str, Any]
    max_tokens: int
    overlap: int


@dataclass(frozen=True, slots=True)
class FileBatch:
    id: str
    store_id: str
    created_at: int
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class StorePassage:
    """A chunk that a search returned."""

    store_id: str
    file_id: str
    filename: str
    attributes: dict[str, Any]
    start: int  # characters of the parsed text
    end: int
    text: str
    score: float


class VectorStores:
    """Calls may come from any thread. An owner sees its own stores only."""

    def __init__(self, database: RagDatabase, indexes: StoreIndexes) -> None:
        self._database = database
        self._indexes = indexes
        self._lock = threading.RLock()
        self._open: OrderedDict[str, VectorIndex] = OrderedDict()  # by store, the least recently used first
        self._searches: Counter[str] = Counter()  # that run, by store: their indexes stay open

    # ------------------------------------------------------------------ stores

    def create(
        self,
        owner: str,
        name: str,
        description: str | None,
        metadata: Mapping[str, str],
        expires_days: int | None,
    ) -> VectorStore:
        created, store_id = now(), new_id("vs_")
        self._database.add(
            "stores",
            id=store_id,
            owner=owner,
            name=name,
            description=description,
            metadata=dict(metadata),
            created_at=created,
            expires_days=expires_days,
            last_active_at=created,
        )
        return self.get(owner, store_id)

    def get(self, owner: str, store_id: str) -> VectorStore:
        select = "SELECT * FROM stores WHERE id = ? AND owner = ?"
        return self._database.known(VectorStore, "vector store", store_id, select, store_id, owner)

    def usable(self, owner: str, store_id: str) -> VectorStore:
        """A store that has not expired; notes that it is used."""
        store = self.get(owner, store_id)
        if store.is_expired:
            raise InvalidRequest(
                f"the vector store {store_id} expired {store.expires_days} days after its last use: make another one",
                "vector_store_id",
            )
        if store.last_active_at + ACTIVE_SECONDS <= now():
            self._database.change("UPDATE stores SET last_active_at = ? WHERE id = ?", now(), store_id)
        return store

    def page(self, owner: str, query: PageQuery) -> tuple[list[VectorStore], bool]:
        return self._database.page(VectorStore, "stores", query, "owner = ?", [owner], "vector store")

    def update(self, owner: str, store_id: str, changes: Mapping[str, Any]) -> VectorStore:
        """`changes` by the names of columns."""
        self.get(owner, store_id)
        values = {**changes, "last_active_at": now()}
        names = ", ".join(f"{name} = ?" for name in values)
        self._database.change(f"UPDATE stores SET {names} WHERE id = ?", *values.values(), store_id)
        return self.get(owner, store_id)

    def delete(self, owner: str, store_id: str) -> None:
        store = self.get(owner, store_id)
        with self._database.transaction():
            self._drop_content(store_id)
            self._database.change("DELETE FROM stores WHERE id = ?", store_id)
        self._drop_index(store_id, store.width)

    def drop_expired(self) -> None:
        """Frees what stores hold that have expired; the stores themselves stay, with that status."""
        rows = self._database.rows(
            "SELECT id, width FROM stores WHERE last_active_at + 86400 * expires_days <= ? AND EXISTS "
            "(SELECT 1 FROM store_files WHERE store_id = stores.id)",
            now(),
        )
        for row in rows:
            with self._database.transaction():
                self._drop_content(row["id"])
            self._drop_index(row["id"], row["width"])

    def set_model(self, store_id: str, model: str, width: int) -> None:
        """The encoder of the store's vectors, once the first file is embedded."""
        self._database.change(
            "UPDATE stores SET model = ?, width = ? WHERE id = ? AND model IS NULL", model, width, store_id
        )

    def by_id(self, store_id: str) -> VectorStore | None:
        """Without regard to its owner."""
        row = self._database.row("SELECT * FROM stores WHERE id = ?", store_id)
        return None if row is None else record(VectorStore, row)

    def counts(self, store_id: str, batch_id: str | None = None) -> tuple[dict[str, int], int]:
        """How many files have each status, with the total, and the bytes that they use."""
        where, values = ("batch_id = ?", batch_id) if batch_id is not None else ("store_id = ?", store_id)
        rows = self._database.rows(
            f"SELECT status, COUNT(*) AS files, SUM(usage_bytes) AS bytes FROM store_files WHERE {where} "
            "GROUP BY status",
            values,
        )
        counts = dict.fromkeys(COUNTS, 0) | {row["status"]: row["files"] for row in rows}
        return {**counts, "total": sum(counts.values())}, sum(row["bytes"] for row in rows)

    # ------------------------------------------------------------------ files of a store

    def add_files(self, store: VectorStore, files: Sequence[NewStoreFile]) -> None:
        """Enters files to be parsed and embedded. One that is there already is begun again."""
        with self._database.transaction():
            gone = self._enter(store, files, None)
        self._forget(store.id, gone)

    def _enter(self, store: VectorStore, files: Sequence[NewStoreFile], batch_id: str | None) -> list[int]:
        """Within a transaction; returns the ids of chunks that are gone."""
        gone: list[int] = []
        (count,) = self._database.rows("SELECT COUNT(*) FROM store_files WHERE store_id = ?", store.id)[0]
        if count + len(files) > MAX_STORE_FILES:
            raise InvalidRequest(
                f"the vector store has {count} files and {len(files)} more are asked for, of at most "
                f"{MAX_STORE_FILES}: make another store",
                "file_ids",
            )
        for file in files:
            gone += self._remove(store.id, file.file_id)
            self._database.add(
                "store_files",
                id=file.file_id,
                store_id=store.id,
                batch_id=batch_id,
                created_at=now(),
                status="in_progress",
                attributes=file.attributes,
                max_tokens=file.max_tokens,
                overlap=file.overlap,
                usage_bytes=0,
                is_parsed=0,
            )
        self._database.change("UPDATE stores SET last_active_at = ? WHERE id = ?", now(), store.id)
        return gone

    def create_batch(self, store: VectorStore, files: Sequence[NewStoreFile]) -> FileBatch:
        batch_id = new_id("vsfb_")
        with self._database.transaction():
            self._database.add(
                "file_batches", id=batch_id, store_id=store.id, created_at=now(), is_cancelled=0
            )
            gone = self._enter(store, files, batch_id)
        self._forget(store.id, gone)
        return self.batch(store, batch_id)

    def batch(self, store: VectorStore, batch_id: str) -> FileBatch:
        select = "SELECT * FROM file_batches WHERE id = ? AND store_id = ?"
        return self._database.known(FileBatch, "file batch", batch_id, select, batch_id, store.id)

    def cancel_batch(self, store: VectorStore, batch_id: str) -> FileBatch:
        """Files that are not completed yet will not be."""
        self.batch(store, batch_id)
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM chunks WHERE store_id = ? AND file_id IN "
                "(SELECT id FROM store_files WHERE batch_id = ? AND status = 'in_progress')",
                (store.id, batch_id),
            )
            changed = connection.execute(
                "UPDATE store_files SET status = 'cancelled' WHERE batch_id = ? AND status = 'in_progress'",
                (batch_id,),
            ).rowcount
            if changed:
                connection.execute("UPDATE file_batches SET is_cancelled = 1 WHERE id = ?", (batch_id,))
        return self.batch(store, batch_id)

    def file(self, store: VectorStore, file_id: str) -> StoreFile:
        select = "SELECT * FROM store_files WHERE store_id = ? AND id = ?"
        what = f"file in the vector store {store.id}"
        return self._database.known(StoreFile, what, file_id, select, store.id, file_id)

    def file_page(
        self, store: VectorStore, query: PageQuery, status: str | None = None, batch_id: str | None = None
    ) -> tuple[list[StoreFile], bool]:
        where, values = "store_id = ?", [store.id]
        for column, value in (("status", status), ("batch_id", batch_id)):
            if value is not None:
                where, values = f"{where} AND {column} = ?", [*values, value]
        return self._database.page(StoreFile, "store_files", query, where, values, "file")

    def set_attributes(self, store: VectorStore, file_id: str, attributes: dict[str, Any]) -> StoreFile:
        with self._lock:  # a file that is being completed has its attributes read already
            is_found = self.file(store, file_id).status == "completed"
            index = self._index(store) if is_found else None
            changed = "UPDATE store_files SET attributes = ? WHERE store_id = ? AND id = ?"
            stale = "UPDATE stores SET index_is_stale = index_is_stale | ? WHERE id = ?"
            with self._database.transaction():
                self._database.change(changed, attributes, store.id, file_id)
                self._database.change(stale, is_found, store.id)
            if index is not None:
                try:
                    index.set_attributes(self._chunk_ids(store.id, file_id), attributes)
                except BaseException:
                    self._open.pop(store.id).close()  # built again when it is next used
                    raise
                self._database.change("UPDATE stores SET index_is_stale = 0 WHERE id = ?", store.id)
        return self.file(store, file_id)

    def remove_file(self, store: VectorStore, file_id: str) -> None:
        self.file(store, file_id)
        with self._database.transaction():
            gone = self._remove(store.id, file_id)
        self._forget(store.id, gone)

    def remove_everywhere(self, file_id: str) -> None:
        """Takes a file that is being deleted out of all stores."""
        for row in self._database.rows("SELECT store_id FROM store_files WHERE id = ?", file_id):
            with self._database.transaction():
                gone = self._remove(row["store_id"], file_id)
            self._forget(row["store_id"], gone)

    def text(self, store: VectorStore, file_id: str) -> str:
        """What was parsed from a file: its chunks, without what they have in common."""
        pieces: list[str] = []
        end = 0
        select = "SELECT start, end, text FROM chunks WHERE store_id = ? AND file_id = ? ORDER BY id"
        for row in self._database.rows(select, store.id, file_id):
            if pieces and row["start"] > end:
                pieces.append(" ")  # white space between chunks is not kept
            pieces.append(row["text"][max(0, end - row["start"]) :])
            end = max(end, row["end"])
        return "".join(pieces)

    # ------------------------------------------------------------------ ingestion

    def unparsed(self, limit: int, without: Iterable[tuple[str, str]] = ()) -> list[StoreFile]:
        """The first files that wait to be parsed."""
        rows = self._database.rows(
            "SELECT * FROM store_files WHERE status = 'in_progress' AND is_parsed = 0 ORDER BY number LIMIT ?",
            limit + len(set(without)),
        )
        waiting = [row for row in rows if (row["store_id"], row["id"]) not in set(without)]
        return [record(StoreFile, row) for row in waiting[:limit]]

    def add_chunks(self, file: StoreFile, chunks: Sequence[Chunk]) -> None:
        """The chunks of a file that was parsed, if it is still wanted."""
        with self._database.transaction() as connection:
            changed = connection.execute(
                "UPDATE store_files SET is_parsed = 1 WHERE store_id = ? AND id = ? AND status = 'in_progress' AND "
                "is_parsed = 0",
                (file.store_id, file.id),
            ).rowcount
            if changed:
                connection.executemany(
                    "INSERT INTO chunks (store_id, file_id, start, end, text) VALUES (?, ?, ?, ?, ?)",
                    [(file.store_id, file.id, chunk.start, chunk.end, chunk.text) for chunk in chunks],
                )

    def fail_file(self, file: StoreFile, code: str, message: str) -> None:
        """Ends a file with an error; nothing of it can be found."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE store_files SET status = 'failed', error_code = ?, error_message = ? WHERE store_id = ? AND "
                "id = ? AND status = 'in_progress'",
                (code, message[:1000], file.store_id, file.id),
            )
            connection.execute(
                "DELETE FROM chunks WHERE store_id = ? AND file_id = ? AND NOT EXISTS (SELECT 1 FROM store_files "
                "WHERE store_id = chunks.store_id AND id = file_id AND status = 'completed')",
                (file.store_id, file.id),
            )

    def unembedded(self, limit: int, without: Collection[int] = ()) -> list[WaitingChunk]:
        """The first chunks without vectors, in the order of their files; of one store."""
        beside = "chunks AS {0} ON {0}.id = own.id {1} 1 AND {0}.store_id = own.store_id AND {0}.file_id = own.file_id"
        rows = self._database.rows(
            "SELECT own.id, own.store_id, own.file_id, own.text, later.start - own.start, earlier.end - own.start "
            f"FROM chunks AS own LEFT JOIN {beside.format('later', '+')} LEFT JOIN {beside.format('earlier', '-')} "
            "WHERE own.vectors IS NULL ORDER BY own.id LIMIT ?",
            limit + len(without),
        )
        waiting = [WaitingChunk(*row) for row in rows if row["id"] not in without]
        return [chunk for chunk in waiting if chunk.store_id == waiting[0].store_id][:limit]

    def set_vectors(self, vectors: Mapping[int, bytes]) -> None:
        with self._database.transaction() as connection:
            connection.executemany(
                "UPDATE chunks SET vectors = ? WHERE id = ?", [(data, at) for at, data in vectors.items()]
            )

    def complete_files(self) -> None:
        """Makes files findable whose chunks all have vectors."""
        with self._lock:  # calls from several threads do not complete a file twice
            by_store: dict[str, list[str]] = {}
            for row in self._database.rows(
                "SELECT id, store_id FROM store_files WHERE status = 'in_progress' AND is_parsed = 1 AND NOT EXISTS "
                "(SELECT 1 FROM chunks WHERE store_id = store_files.store_id AND file_id = store_files.id AND vectors "
                "IS NULL)"
            ):
                by_store.setdefault(row["store_id"], []).append(row["id"])
            for store_id, file_ids in by_store.items():
                store = self.by_id(store_id)
                if store is not None:
                    self._complete(store, file_ids)

    def _complete(self, store: VectorStore, file_ids: Sequence[str]) -> None:
        """Into the index first: a process that ends in between completes them again, with the same ids."""
        index = self._index(store)
        if index is not None:
            for points in self._points(store, file_ids):
                index.upsert(points)
        with self._database.transaction() as connection:
            connection.executemany(
                "UPDATE store_files SET status = 'completed', usage_bytes = (SELECT COALESCE(SUM(LENGTH(CAST(text "
                "AS BLOB)) + LENGTH(vectors)), 0) FROM chunks WHERE store_id = store_files.store_id AND file_id = "
                "store_files.id) WHERE store_id = ? AND id = ? AND status = 'in_progress'",
                [(store.id, file_id) for file_id in file_ids],
            )

    # ------------------------------------------------------------------ search

    def search(self, store: VectorStore, query: IndexQuery) -> list[StorePassage]:
        """What the index finds, as passages of completed files; the best first."""
        with self._lock:
            index = self._index(store)
            self._searches[store.id] += 1
        try:
            hits = [] if index is None else index.search(query)
        finally:
            with self._lock:
                self._searches[store.id] -= 1
        marks = ", ".join("?" * len(hits))
        rows = {
            row["id"]: row
            for row in self._database.rows(
                "SELECT chunks.id, file_id, start, end, text, attributes, filename FROM chunks JOIN store_files ON "
                "store_files.store_id = chunks.store_id AND store_files.id = file_id JOIN files ON files.id = file_id "
                f"WHERE chunks.id IN ({marks}) AND chunks.store_id = ? AND status = 'completed' AND "
                "(expires_at IS NULL OR expires_at > ?)",
                *(hit.chunk_id for hit in hits),
                *(store.id, now()),
            )
        }
        return [
            StorePassage(
                store.id,
                row["file_id"],
                row["filename"],
                json.loads(row["attributes"]),
                row["start"],
                row["end"],
                row["text"],
                hit.score,
            )
            for hit in hits
            if (row := rows.get(hit.chunk_id)) is not None
        ]

    def _index(self, store: VectorStore) -> VectorIndex | None:
        """The open index of a store; None while the store has no vectors. Built again if it does not fit."""
        index = self._open.get(store.id)
        if index is None:
            known = self.by_id(store.id)
            if known is None or known.width is None:
                return None
            index = self._opened(known, known.width)
            idle = [name for name in self._open if not self._searches[name]]
            for name in idle[: max(0, len(self._open) + 1 - MAX_OPEN)]:
                self._open.pop(name).close()
            self._open[store.id] = index
        self._open.move_to_end(store.id)
        return index

    def _opened(self, store: VectorStore, width: int) -> VectorIndex:
        ((num_chunks, is_stale),) = self._database.rows(
            "SELECT COUNT(*), (SELECT index_is_stale FROM stores WHERE id = ?) FROM chunks JOIN store_files ON "
            "store_files.store_id = chunks.store_id AND store_files.id = file_id WHERE chunks.store_id = ? AND "
            "status = 'completed'",
            *(store.id, store.id),
        )
        try:
            index = self._indexes.open(store.id, width)
            if len(index) == num_chunks and not is_stale:
                return index
            index.close()
        except StoreUnreachable:
            raise  # it may be whole
        except Exception as fault:  # an index holds nothing of its own: a damaged one is made again
            log.warning("index     of %s cannot be read (%s)", store.id, fault)
        self._indexes.drop(store.id, width)
        index, done = self._indexes.open(store.id, width), 0
        select = "SELECT id FROM store_files WHERE store_id = ? AND status = 'completed' ORDER BY number"
        for points in self._points(store, [row["id"] for row in self._database.rows(select, store.id)]):
            index.upsert(points)
            done += len(points)
            log.info("index     of %s: %d of %d chunks", store.id, done, num_chunks)
        self._database.change("UPDATE stores SET index_is_stale = 0 WHERE id = ?", store.id)
        return index

    def _points(self, store: VectorStore, file_ids: Sequence[str]) -> Iterable[list[Point]]:
        points: list[Point] = []
        for file_id in file_ids:
            for row in self._database.rows(
                "SELECT chunks.id, text, vectors, attributes FROM chunks JOIN store_files ON store_files.store_id = "
                "chunks.store_id AND store_files.id = file_id WHERE chunks.store_id = ? AND file_id = ? ORDER BY "
                "chunks.id",
                *(store.id, file_id),
            ):
                vectors = numpy.frombuffer(row["vectors"], dtype=numpy.float32).reshape(-1, store.width or 1)
                points.append(Point(row["id"], list(vectors), row["text"], json.loads(row["attributes"])))
                if len(points) >= REBUILT_AT_ONCE:
                    yield points
                    points = []
        if points:
            yield points

    def check_indexes(self) -> None:
        """Opens every store's index once, which builds again what is missing."""
        for row in self._database.rows("SELECT * FROM stores WHERE width IS NOT NULL ORDER BY number"):
            with self._lock:
                self._index(record(VectorStore, row))
        self._indexes.drop_others({row["id"] for row in self._database.rows("SELECT id FROM stores")})

    def close(self) -> None:
        with self._lock:
            for index in self._open.values():
                index.close()
            self._open.clear()

    # ------------------------------------------------------------------ removal

    def _chunk_ids(self, store_id: str, file_id: str) -> list[int]:
        select = "SELECT id FROM chunks WHERE store_id = ? AND file_id = ?"
        return [row["id"] for row in self._database.rows(select, store_id, file_id)]

    def _remove(self, store_id: str, file_id: str) -> list[int]:
        """Within a transaction; returns the ids of the file's chunks."""
        chunk_ids = self._chunk_ids(store_id, file_id)
        self._database.change("DELETE FROM chunks WHERE store_id = ? AND file_id = ?", store_id, file_id)
        self._database.change("DELETE FROM store_files WHERE store_id = ? AND id = ?", store_id, file_id)
        return chunk_ids

    def _forget(self, store_id: str, chunk_ids: Sequence[int]) -> None:
        """After the transaction: what the index still names is not in the database. One that is not open is built
        again when it is opened."""
        with self._lock:
            index = self._open.get(store_id)
            try:
                if index is not None and chunk_ids:
                    index.delete(chunk_ids)
            except StoreUnreachable as fault:
                log.warning("index     of %s is built again when it is next used: %s", store_id, fault)
                self._open.pop(store_id)

    def _drop_content(self, store_id: str) -> None:
        for table in ("chunks", "store_files", "file_batches"):
            self._database.change(f"DELETE FROM {table} WHERE store_id = ?", store_id)

    def _drop_index(self, store_id: str, width: int | None) -> None:
        with self._lock:
            index = self._open.pop(store_id, None)
            if index is not None:
                index.close()
            try:
                self._indexes.drop(store_id, width)
            except StoreUnreachable as fault:
                log.warning("index     of %s cannot be deleted: %s", store_id, fault)
