"""HnswIndex: a graph of vectors and an inverted index of words, by qdrant-edge. The only file that knows that package.

New points are searched exactly until there are BUILD_FROM of them. Then the graph is built in another process
(`python -m quire.rag.hnsw FOLDER`) on a copy of the files, because the package holds the interpreter lock while it
builds. Changes that arrive meanwhile are noted and made again in the new copy, which then replaces the old one.
"""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import qdrant_edge as qdrant

from quire.observe.logs import get_logger
from quire.rag.exact import Stored
from quire.rag.filters import Filter
from quire.rag.qdrant_terms import (
    DENSE,
    EF,
    SCHEMAS,
    USUAL_LENGTH,
    WORDS,
    filter_terms,
    payload_of,
    word_weights,
)
from quire.rag.ranking import Hit, IndexFault, IndexQuery, Point, ranked_hits
from quire.rag.words import word_counts

logger = get_logger(__name__)

BUILD_FROM = 10_000  # points outside the graph
SCAN_KB = 20_000  # a filter that leaves fewer vectors than this is answered by comparing all of them
MAX_FIELD_INDEXES = 64
SETTINGS = "quire.json"
_WITH_FILTER = qdrant.SearchParams(
    hnsw_ef=EF, acorn=qdrant.AcornSearchParams(enable=True, max_selectivity=1.0)
)
_WITHOUT_FILTER = qdrant.SearchParams(hnsw_ef=EF)
_SCHEMAS = {"keyword": qdrant.PayloadSchemaType.Keyword, "float": qdrant.PayloadSchemaType.Float}


class HnswIndex:
    """In `folder`/hnsw. `average_length` (words of a chunk) is fixed when the index is made: words' weights need it."""

    def __init__(
        self, folder: Path, dimension: int, average_length: float | None = None, *, background: bool = True
    ) -> None:
        self._folder, self._dimension, self._background = folder / "hnsw", dimension, background
        self._lock = threading.RLock()
        self._settle_swap()
        self._average_length = average_length
        self._noted: list[Any] | None = None  # changes since the copy that is being built
        self._builder: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._shard = self._opened()
        self._fields = set(self._shard.info().payload_schema)

    # ------------------------------------------------------------------ changes

    def upsert(self, points: Sequence[Point]) -> None:
        self.upsert_stored([Stored.of(point, self._dimension) for point in points])

    def upsert_stored(self, points: Sequence[Stored]) -> None:
        if not points:
            return
        with self._lock:
            if self._average_length is None:
                self._average_length = sum(sum(point.words.values()) for point in points) / len(points)
                self._write_settings()
            made = [self._point(point) for point in points]
            for point in points:
                self._index_fields(payload_of(point.attributes))
            self._change(qdrant.UpdateOperation.upsert_points(made))
            self._build_if_due()

    def delete(self, chunk_ids: Sequence[int]) -> None:
        if chunk_ids:
            self._change(qdrant.UpdateOperation.delete_points(list(chunk_ids)))

    def set_attributes(self, chunk_ids: Sequence[int], attributes: dict[str, Any]) -> None:
        payload = payload_of(attributes)
        with self._lock:
            self._index_fields(payload)
            if chunk_ids:
                self._change(qdrant.UpdateOperation.overwrite_payload(list(chunk_ids), payload))

    def _change(self, operation: Any) -> None:
        with self._lock:
            self._shard.update(operation)
            if self._noted is not None:
                self._noted.append(operation)

    def _point(self, stored: Stored) -> Any:
        indices, weights = word_weights(stored.words, self._average_length or USUAL_LENGTH)
        vectors = {DENSE: stored.vectors.tolist()}
        if indices:  # `num_indexed` counts the points that have words
            vectors[WORDS] = qdrant.SparseVector(indices, weights)
        return qdrant.Point(stored.chunk_id, vectors, payload_of(stored.attributes))

    def _index_fields(self, payload: dict[str, Any]) -> None:
        for name in payload:
            if name not in self._fields and len(self._fields) < MAX_FIELD_INDEXES:
                self._fields.add(name)
                self._change(qdrant.UpdateOperation.create_field_index(name, _SCHEMAS[SCHEMAS[name[0]]]))

    # ------------------------------------------------------------------ search

    def search(self, query: IndexQuery) -> list[Hit]:
        with self._lock:
            return ranked_hits(self, query)

    def by_vector(self, vector: numpy.ndarray, limit: int, filter: Filter | None) -> list[tuple[int, float]]:
        query = qdrant.Query.Nearest([vector.tolist()], using=DENSE)
        return self._ranked(query, limit, filter, _WITHOUT_FILTER if filter is None else _WITH_FILTER)

    def by_words(self, text: str, limit: int, filter: Filter | None) -> list[tuple[int, float]]:
        words = word_counts(text)
        if not words:
            return []
        sparse = qdrant.SparseVector(list(words), [1.0] * len(words))
        return self._ranked(qdrant.Query.Nearest(sparse, using=WORDS), limit, filter, None)

    def _ranked(self, query: Any, limit: int, filter: Filter | None, params: Any) -> list[tuple[int, float]]:
        wanted = None if filter is None else edge_filter(filter_terms(filter))
        found = self._shard.query(qdrant.QueryRequest(limit, query=query, filter=wanted, params=params))
        return sorted(((point.id, point.score) for point in found), key=lambda pair: (-pair[1], pair[0]))

    def __len__(self) -> int:
        with self._lock:
            return self._shard.count(qdrant.CountRequest(exact=True))

    # ------------------------------------------------------------------ files, and building the graph

    def close(self) -> None:
        """Ends a graph that is being built: it is built again when it is next due. Calling it twice is fine."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
            self._shard.close()
        self.wait()

    def wait(self) -> None:
        """Until no graph is being built."""
        while (builder := self._builder) is not None and builder.is_alive():
            builder.join()

    @property
    def num_indexed(self) -> int:
        """Vectors that are in the graph, about: the package counts the vectors of words as well."""
        with_words = qdrant.Filter(must=[qdrant.HasVectorCondition(WORDS)])
        num_words = self._shard.count(qdrant.CountRequest(exact=True, filter=with_words))
        return max(0, self._shard.info().indexed_vectors_count - num_words)

    def _build_if_due(self) -> None:
        if self._background and self._noted is None and len(self) - self.num_indexed >= BUILD_FROM:
            self._noted = []
            copy = self._folder.with_name("hnsw.new")
            shutil.rmtree(copy, ignore_errors=True)
            self._shard.flush()
            shutil.copytree(self._folder, copy)
            self._builder = threading.Thread(target=self._build, args=(copy,), daemon=True)
            self._builder.start()

    def _build(self, copy: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.rag.hnsw", str(copy)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        with self._lock:
            self._process = process
            if self._is_closed:
                process.kill()
        _, problem = process.communicate()
        with self._lock:
            noted, self._noted, self._process = self._noted or [], None, None
            if self._is_closed or process.returncode != 0:
                shutil.rmtree(copy, ignore_errors=True)
                if not self._is_closed:
                    shown = problem.decode(errors="replace")[-300:]
                    logger.warning("building a search graph failed: %s", shown)
                return
            self._swap(copy, noted)
            if noted:
                self._build_if_due()  # for the points that came meanwhile

    def _swap(self, copy: Path, noted: list[Any]) -> None:
        self._shard.close()
        old = self._folder.with_name("hnsw.old")
        shutil.rmtree(old, ignore_errors=True)
        self._folder.rename(old)
        copy.rename(self._folder)
        self._shard = qdrant.EdgeShard.load(str(self._folder))
        for operation in noted:
            self._shard.update(operation)
        self._shard.flush()
        shutil.rmtree(old, ignore_errors=True)

    def _settle_swap(self) -> None:
        """After a crash the old files count until the new ones had all changes."""
        old, new = self._folder.with_name("hnsw.old"), self._folder.with_name("hnsw.new")
        if (old / SETTINGS).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            old.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(new, ignore_errors=True)

    def _opened(self) -> Any:
        try:
            if (self._folder / SETTINGS).exists():
                settings = json.loads((self._folder / SETTINGS).read_text())
                self._average_length = settings["average_length"]
                made_for, shard = settings["dimension"], qdrant.EdgeShard.load(str(self._folder))
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
                made_for = self._dimension
                shard = qdrant.EdgeShard.create(str(self._folder), _config(made_for))
                self._write_settings()
        except OSError:
            raise
        except Exception as error:  # the package has no class of its own for broken files
            raise IndexFault(f"the index {self._folder} cannot be read ({error}): delete it") from error
        if made_for != self._dimension:
            raise IndexFault(
                f"the index {self._folder} is for vectors of {made_for} numbers, not {self._dimension}: delete it"
            )
        return shard

    def _write_settings(self) -> None:
        settings = {"dimension": self._dimension, "average_length": self._average_length}
        (self._folder / SETTINGS).write_text(json.dumps(settings))


def _config(dimension: int) -> Any:
    best = qdrant.MultiVectorConfig(qdrant.MultiVectorComparator.MaxSim)
    dense = qdrant.EdgeVectorParams(size=dimension, distance=qdrant.Distance.Cosine, multivector_config=best)
    return qdrant.EdgeConfig(
        vectors={DENSE: dense},
        sparse_vectors={WORDS: qdrant.EdgeSparseVectorParams(modifier=qdrant.Modifier.Idf)},
        hnsw_config=qdrant.HnswIndexConfig(m=16, ef_construct=128, full_scan_threshold=SCAN_KB),
        optimizers=qdrant.EdgeOptimizersConfig(indexing_threshold=SCAN_KB // 2, default_segment_number=1),
    )


# ---------------------------------------------------------------------- filters


def edge_filter(terms: dict[str, Any]) -> Any:
    """The package's object of `filter_terms`."""
    parts: dict[str, Any] = {name: [_condition(part) for part in inner] for name, inner in terms.items()}
    return qdrant.Filter(**parts)


def _condition(terms: dict[str, Any]) -> Any:
    if "range" in terms:
        return qdrant.FieldCondition(terms["key"], range=qdrant.RangeFloat(**terms["range"]))
    if "match" in terms:
        return qdrant.FieldCondition(terms["key"], match=qdrant.MatchValue(terms["match"]["value"]))
    if "has_id" in terms:
        return qdrant.HasIdCondition(set(terms["has_id"]))
    return edge_filter(terms)


if __name__ == "__main__":
    built = qdrant.EdgeShard.load(sys.argv[1])
    built.optimize()
    built.close()
