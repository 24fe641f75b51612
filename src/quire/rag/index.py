"""`open_index`: exact search for small indexes, and from 10,000 chunks on a graph, if qdrant-edge-py is installed.

`store_indexes`: where the indexes of vector stores are, a folder each or a collection each of a Qdrant server.
"""

import importlib
import importlib.util
import shutil
import threading
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from quire.core.errors import ConfigError
from quire.rag.exact import ExactIndex
from quire.rag.qdrant_server import ServerIndex
from quire.rag.ranking import Hit, IndexQuery, Point, VectorIndex

EXACT_CHUNKS = 10_000
_BATCH = 1000
_GRAPH = "quire.rag.hnsw"  # imported when it is needed: its package may be missing


def open_index(
    folder: Path | None, dimension: int, kind: Literal["auto", "exact", "hnsw"] = "auto"
) -> VectorIndex:
    """The index in `folder`, made if it is not there; in memory if `folder` is None.

    `auto` compares with every vector up to 10,000 chunks, and changes to a graph (HNSW) above that. An index that
    became a graph stays one. Without qdrant-edge-py, and in memory, all search is exact.
    """
    has_graphs = importlib.util.find_spec("qdrant_edge") is not None
    if kind == "hnsw":
        if not has_graphs:
            raise ConfigError("an HNSW index needs qdrant-edge-py: pip install 'quire[rag]'")
        if folder is None:
            raise ConfigError("an HNSW index needs a folder: give one, or choose kind='exact'")
        return _graph_in(folder, dimension)
    if kind == "exact" or not has_graphs or folder is None:
        return ExactIndex(folder, dimension)
    return GrowingIndex(folder, dimension)


class GrowingIndex:
    """Exact up to `exact_chunks`, then a graph."""

    def __init__(self, folder: Path, dimension: int, exact_chunks: int = EXACT_CHUNKS) -> None:
        self._folder, self._dimension, self._exact_chunks = folder, dimension, exact_chunks
        self._lock = threading.RLock()
        has_graph = (folder / "hnsw").exists()
        self._index = _graph_in(folder, dimension) if has_graph else ExactIndex(folder, dimension)

    def upsert(self, points: Sequence[Point]) -> None:
        with self._lock:
            exact = self._index
            if isinstance(exact, ExactIndex) and len(exact) + len(points) > self._exact_chunks:
                self._index = self._grown(exact)
            self._index.upsert(points)

    def delete(self, chunk_ids: Sequence[int]) -> None:
        with self._lock:
            self._index.delete(chunk_ids)

    def set_attributes(self, chunk_ids: Sequence[int], attributes: dict[str, Any]) -> None:
        with self._lock:
            self._index.set_attributes(chunk_ids, attributes)

    def search(self, query: IndexQuery) -> list[Hit]:
        with self._lock:
            return self._index.search(query)

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        with self._lock:
            self._index.close()

    def _grown(self, exact: ExactIndex) -> VectorIndex:
        """A graph of the same points. It gets its final name when it is complete: a crash before leaves `exact`."""
        unfinished = self._folder / "hnsw.growing"
        shutil.rmtree(unfinished, ignore_errors=True)
        module = importlib.import_module(_GRAPH)
        graph = module.HnswIndex(unfinished, self._dimension, exact.average_length, background=False)
        stored = exact.stored()
        while batch := list(islice(stored, _BATCH)):
            graph.upsert_stored(batch)
        graph.close()
        (unfinished / "hnsw").rename(self._folder / "hnsw")
        shutil.rmtree(unfinished, ignore_errors=True)
        exact.remove()
        return _graph_in(self._folder, self._dimension)


def _graph_in(folder: Path, dimension: int) -> VectorIndex:
    graph: VectorIndex = importlib.import_module(_GRAPH).HnswIndex(folder, dimension)
    return graph


# ---------------------------------------------------------------------- of vector stores


class StoreIndexes(Protocol):
    def open(self, store_id: str, width: int) -> VectorIndex:
        """The index of a store, made if it is not there. Raises if it cannot be used."""
        ...

    def drop(self, store_id: str, width: int | None) -> None:
        """Deletes the index of a store, which must not be open; `width` is None for a store that never had one."""
        ...

    def drop_others(self, store_ids: Collection[str]) -> None:
        """Deletes what belongs to none of these stores, where that is known."""
        ...


class FolderIndexes:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, store_id: str, width: int) -> VectorIndex:
        return open_index(self._folder / store_id, width)

    def drop(self, store_id: str, width: int | None) -> None:
        shutil.rmtree(self._folder / store_id, ignore_errors=True)

    def drop_others(self, store_ids: Collection[str]) -> None:
        for path in self._folder.iterdir():
            if path.name not in store_ids:
                shutil.rmtree(path, ignore_errors=True)


class ServerIndexes:
    """Collections are named as their stores. Those of other programs, and of other data folders, are left alone."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, store_id: str, width: int) -> VectorIndex:
        return ServerIndex(self._url, store_id, width)

    def drop(self, store_id: str, width: int | None) -> None:
        if width is not None:
            index = ServerIndex(self._url, store_id, width)
            index.drop()
            index.close()

    def drop_others(self, store_ids: Collection[str]) -> None:
        pass


def store_indexes(folder: Path, address: str | None) -> StoreIndexes:
    """`address` as --vector-store has it; None: in `folder`."""
    return FolderIndexes(folder) if address is None else ServerIndexes(address)
