"""ExactIndex: compares a query with every vector, and ranks words by BM25. Numpy and SQLite, nothing else."""

import json
import math
import sqlite3
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from quire.rag.filters import Filter
from quire.rag.ranking import Hit, IndexFault, IndexQuery, Point, ranked_hits, unit_vectors
from quire.rag.words import K1, B, word_counts

FILE = "points.sqlite"
COMPACT_FROM = 1000  # deleted rows before the arrays are made again


@dataclass(frozen=True, slots=True)
class Stored:
    """A point as indexes keep it."""

    chunk_id: int
    vectors: numpy.ndarray  # [windows, dimension] float32, of length one
    words: dict[int, int]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, point: Point, dimension: int) -> "Stored":
        return cls(
            point.chunk_id, unit_vectors(point, dimension), word_counts(point.text), dict(point.attributes)
        )


class ExactIndex:
    """Points are in a SQLite file, and in arrays that are searched. In memory only if `folder` is None."""

    def __init__(self, folder: Path | None, dimension: int) -> None:
        self._dimension = dimension
        self._lock = threading.RLock()
        self._path = None if folder is None else folder / FILE
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._database = self._opened()
        self._rows = self._read_rows()

    def upsert(self, points: Sequence[Point]) -> None:
        made = [Stored.of(point, self._dimension) for point in points]
        with self._lock:
            with self._database:
                self._database.executemany(
                    "INSERT OR REPLACE INTO point VALUES (?, ?, ?, ?)", [_row(stored) for stored in made]
                )
            for stored in made:
                self._rows.remove(stored.chunk_id)
                self._rows.add(stored)
            self._compact()

    def delete(self, chunk_ids: Sequence[int]) -> None:
        with self._lock:
            with self._database:
                self._database.executemany(
                    "DELETE FROM point WHERE chunk_id = ?", [(one,) for one in chunk_ids]
                )
            for chunk_id in chunk_ids:
                self._rows.remove(chunk_id)
            self._compact()

    def set_attributes(self, chunk_ids: Sequence[int], attributes: dict[str, Any]) -> None:
        text = json.dumps(attributes)
        with self._lock:
            with self._database:
                self._database.executemany(
                    "UPDATE point SET attributes = ? WHERE chunk_id = ?", [(text, one) for one in chunk_ids]
                )
            for chunk_id in chunk_ids:
                self._rows.set_attributes(chunk_id, attributes)

    def search(self, query: IndexQuery) -> list[Hit]:
        with self._lock:
            return ranked_hits(self._rows, query)

    def __len__(self) -> int:
        return self._rows.num_live

    def close(self) -> None:
        """Calling it twice is fine."""
        with self._lock:
            self._database.close()

    def remove(self) -> None:
        """Closes the index and deletes its files."""
        self.close()
        if self._path is not None:
            for ending in ("", "-wal", "-shm"):
                self._path.with_name(self._path.name + ending).unlink(missing_ok=True)

    @property
    def average_length(self) -> float:
        """Words of a chunk."""
        return self._rows.average_length

    def stored(self) -> Iterator[Stored]:
        """All points, in the order of their ids."""
        rows = self._database.execute(
            "SELECT chunk_id, vectors, words, attributes FROM point ORDER BY chunk_id"
        )
        for chunk_id, vectors, words, attributes in rows:
            matrix = numpy.frombuffer(vectors, numpy.float32).reshape(-1, self._dimension)
            pairs = array("I", words)
            yield Stored(
                chunk_id, matrix, dict(zip(pairs[::2], pairs[1::2], strict=True)), json.loads(attributes)
            )

    def _opened(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(self._path or ":memory:", check_same_thread=False)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")  # survives the process, not every power cut
            made_for = database.execute("PRAGMA user_version").fetchone()[0]
            database.execute(
                "CREATE TABLE IF NOT EXISTS point"
                " (chunk_id INTEGER PRIMARY KEY, vectors BLOB, words BLOB, attributes TEXT)"
            )
            database.execute(f"PRAGMA user_version = {self._dimension:d}")
        except sqlite3.DatabaseError as error:
            raise IndexFault(f"the index {self._path} cannot be read ({error}): delete it") from error
        if made_for not in (0, self._dimension):
            raise IndexFault(
                f"the index {self._path} is for vectors of {made_for} numbers, not {self._dimension}: delete it"
            )
        return database

    def _compact(self) -> None:
        if self._rows.num_dead > max(COMPACT_FROM, self._rows.num_live):
            self._rows = self._read_rows()

    def _read_rows(self) -> "_Rows":
        rows = _Rows(self._dimension)
        for stored in self.stored():
            rows.add(stored)
        return rows


def _row(stored: Stored) -> tuple[int, bytes, bytes, str]:
    pairs = array("I", [number for pair in stored.words.items() for number in pair])
    return stored.chunk_id, stored.vectors.tobytes(), pairs.tobytes(), json.dumps(stored.attributes)


class _Rows:
    """The arrays that are searched: one row per point, in the order of arrival. A removed point's row is marked."""

    def __init__(self, dimension: int) -> None:
        self._row_of: dict[int, int] = {}
        self._chunk_ids = array("q")
        self._alive = array("b")
        self._lengths = array("I")  # words
        self._first_vectors = array("I")
        self._num_vectors = 0
        self._vectors = numpy.empty((64, dimension), numpy.float32)
        self._groups = array("I")  # of equal attributes: a filter is evaluated once for each
        self._group_of: dict[str, int] = {}
        self._group_attributes: list[dict[str, Any]] = []
        self._postings: dict[int, tuple[array[int], array[int]]] = {}  # by word: rows, and how often in each

    @property
    def num_live(self) -> int:
        return len(self._row_of)

    @property
    def num_dead(self) -> int:
        return len(self._chunk_ids) - len(self._row_of)

    @property
    def average_length(self) -> float:
        lengths = _view(self._lengths, numpy.uint32)[_view(self._alive, numpy.bool_)]
        return float(lengths.mean()) if lengths.size else 0.0

    def add(self, stored: Stored) -> None:
        row = self._row_of[stored.chunk_id] = len(self._chunk_ids)
        self._chunk_ids.append(stored.chunk_id)
        self._alive.append(1)
        self._lengths.append(sum(stored.words.values()))
        self._first_vectors.append(self._num_vectors)
        self._groups.append(self._group(stored.attributes))
        for word, count in stored.words.items():
            rows, counts = self._postings.setdefault(word, (array("I"), array("I")))
            rows.append(row)
            counts.append(count)
        end = self._num_vectors + len(stored.vectors)
        if end > len(self._vectors):
            grown = numpy.empty((2 * end, self._vectors.shape[1]), numpy.float32)
            grown[: self._num_vectors] = self._vectors[: self._num_vectors]
            self._vectors = grown
        self._vectors[self._num_vectors : end] = stored.vectors
        self._num_vectors = end

    def remove(self, chunk_id: int) -> None:
        row = self._row_of.pop(chunk_id, None)
        if row is not None:
            self._alive[row] = 0

    def set_attributes(self, chunk_id: int, attributes: dict[str, Any]) -> None:
        row = self._row_of.get(chunk_id)
        if row is not None:
            self._groups[row] = self._group(attributes)

    def by_vector(self, vector: numpy.ndarray, limit: int, filter: Filter | None) -> list[tuple[int, float]]:
        if not self._row_of:
            return []
        length = float(numpy.linalg.norm(vector))
        scores = self._vectors[: self._num_vectors] @ (vector / (length or 1.0)).astype(numpy.float32)
        best = numpy.maximum.reduceat(scores, _view(self._first_vectors, numpy.uint32))
        return self._best(best, self._candidates(filter), limit)

    def by_words(self, text: str, limit: int, filter: Filter | None) -> list[tuple[int, float]]:
        """BM25; chunks without any of the words are left out."""
        alive = _view(self._alive, numpy.bool_)
        lengths = _view(self._lengths, numpy.uint32)
        scores = numpy.zeros(len(alive), numpy.float32)
        average = self.average_length or 1.0
        for word in word_counts(text):
            rows, counts = (_view(part, numpy.uint32) for part in self._postings.get(word, ((), ())))
            frequency = int(alive[rows].sum())
            if frequency:
                rarity = math.log(1 + (self.num_live - frequency + 0.5) / (frequency + 0.5))
                scores[rows] += (
                    rarity * counts * (K1 + 1) / (counts + K1 * (1 - B + B * lengths[rows] / average))
                )
        return self._best(scores, self._candidates(filter) & (scores > 0), limit)

    def _candidates(self, filter: Filter | None) -> numpy.ndarray:
        alive = _view(self._alive, numpy.bool_).copy()
        if filter is not None:
            matching = [filter.matches(attributes) for attributes in self._group_attributes]
            alive &= numpy.array(matching, numpy.bool_)[_view(self._groups, numpy.uint32)]
        return alive

    def _best(self, scores: numpy.ndarray, candidates: numpy.ndarray, limit: int) -> list[tuple[int, float]]:
        rows = numpy.flatnonzero(candidates)
        if len(rows) > limit:
            worst = numpy.partition(scores[rows], -limit)[-limit]
            rows = rows[scores[rows] >= worst]  # equal scores at the end are all kept, and the lowest ids win
        chunk_ids = _view(self._chunk_ids, numpy.int64)[rows]
        order = numpy.lexsort((chunk_ids, -scores[rows]))[:limit]
        return list(zip(chunk_ids[order].tolist(), scores[rows[order]].tolist(), strict=True))

    def _group(self, attributes: dict[str, Any]) -> int:
        key = json.dumps(attributes, sort_keys=True)
        group = self._group_of.setdefault(key, len(self._group_attributes))
        if group == len(self._group_attributes):
            self._group_attributes.append(attributes)
        return group


def _view(values: Any, kind: Any) -> numpy.ndarray:
    """Of an array's memory: it cannot grow while a view of it lives."""
    return numpy.frombuffer(values, kind) if len(values) else numpy.empty(0, kind)
