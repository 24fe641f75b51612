"""ServerIndex: chunks in a collection of a Qdrant server, over its HTTP API: `qdrant://host:6333`.

For collections that one machine does not hold. Tested against a stand-in for the server that checks the requests; it
was not run against a real one.
"""

import json
import os
import threading
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

import numpy

from quire.core.errors import ConfigError, QuireError
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

USUAL_PORT = 6333
SECONDS = 30.0
_SCHEMES = ("qdrant", "qdrants")  # the second one is over TLS


class StoreUnreachable(QuireError):
    """The server did not answer, or refused."""


class ServerIndex:
    """A VectorIndex. The collection is made if it is not there. The key, if any, is $QDRANT_API_KEY."""

    def __init__(self, url: str, collection: str, dimension: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise ConfigError(f"the vector store {url!r} is no address: write qdrant://host:{USUAL_PORT}")
        kind = HTTPConnection if parts.scheme == "qdrant" else HTTPSConnection
        self._connection = kind(parts.hostname, parts.port or USUAL_PORT, timeout=SECONDS)
        self._path, self._dimension = f"/collections/{quote(collection, safe='')}", dimension
        self._lock = threading.RLock()
        self._fields: set[str] = set()
        self._open()

    def upsert(self, points: Sequence[Point]) -> None:
        stored = [Stored.of(point, self._dimension) for point in points]
        if not stored:
            return
        payloads = [payload_of(point.attributes) for point in stored]
        self._index_fields({name for payload in payloads for name in payload})
        rows = []
        for point, payload in zip(stored, payloads, strict=True):
            indices, values = word_weights(point.words, USUAL_LENGTH)
            vector = {DENSE: point.vectors.tolist(), WORDS: {"indices": indices, "values": values}}
            rows.append({"id": point.chunk_id, "vector": vector, "payload": payload})
        self._ask("PUT", "/points?wait=true", {"points": rows})

    def delete(self, chunk_ids: Sequence[int]) -> None:
        if chunk_ids:
            self._ask("POST", "/points/delete?wait=true", {"points": list(chunk_ids)})

    def set_attributes(self, chunk_ids: Sequence[int], attributes: dict[str, Any]) -> None:
        payload = payload_of(attributes)
        self._index_fields(set(payload))
        if chunk_ids:
            self._ask("PUT", "/points/payload?wait=true", {"payload": payload, "points": list(chunk_ids)})

    def search(self, query: IndexQuery) -> list[Hit]:
        return ranked_hits(self, query)

    def by_vector(self, vector: numpy.ndarray, limit: int, filter: Filter | None) -> list[tuple[int, float]]:
        params: dict[str, Any] = {"hnsw_ef": EF}
        if filter is not None:
            params["acorn"] = {"enable": True}
        return self._ranked({"query": [vector.tolist()], "using": DENSE, "params": params}, limit, filter)

    def by_words(self, text: str, limit: int, filter: Filter | None) -> list[tuple[int, float]]:
        words = list(word_counts(text))
        query = {"indices": words, "values": [1.0] * len(words)}
        return self._ranked({"query": query, "using": WORDS}, limit, filter) if words else []

    def _ranked(self, body: dict[str, Any], limit: int, filter: Filter | None) -> list[tuple[int, float]]:
        wanted = {} if filter is None else {"filter": filter_terms(filter)}
        answer = self._ask("POST", "/points/query", {**body, **wanted, "limit": limit})
        hits = [(point["id"], point["score"]) for point in answer["points"]]
        return sorted(hits, key=lambda hit: (-hit[1], hit[0]))

    def __len__(self) -> int:
        count: int = self._ask("POST", "/points/count", {"exact": True})["count"]
        return count

    def drop(self) -> None:
        """Deletes the collection."""
        self._ask("DELETE", "", None, missing_is_none=True)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _open(self) -> None:
        present = self._ask("GET", "", None, missing_is_none=True)
        if present is None:
            best = {"comparator": "max_sim"}
            dense = {"size": self._dimension, "distance": "Cosine", "multivector_config": best}
            body = {"vectors": {DENSE: dense}, "sparse_vectors": {WORDS: {"modifier": "idf"}}}
            self._ask("PUT", "", body)
            return
        made_for = present["config"]["params"]["vectors"].get(DENSE, {}).get("size")
        if made_for != self._dimension:
            raise IndexFault(
                f"the collection {self._path} is for vectors of {made_for} numbers, not {self._dimension}: delete it"
            )
        self._fields = set(present.get("payload_schema") or {})

    def _index_fields(self, names: set[str]) -> None:
        for name in sorted(names - self._fields):
            self._ask("PUT", "/index?wait=true", {"field_name": name, "field_schema": SCHEMAS[name[0]]})
            self._fields.add(name)

    def _ask(self, method: str, path: str, body: Any, missing_is_none: bool = False) -> Any:
        """The answer's result. A connection that the server closed is opened again, once."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("QDRANT_API_KEY"):
            headers["api-key"] = key
        content = None if body is None else json.dumps(body)
        with self._lock:
            for attempt in (1, 2):
                try:
                    self._connection.request(method, self._path + path, content, headers)
                    response = self._connection.getresponse()
                    raw = response.read()
                    break
                except (OSError, HTTPException) as error:
                    self._connection.close()
                    if attempt == 2:
                        problem = (
                            f"at {self._connection.host}:{self._connection.port} does not answer ({error})"
                        )
                        raise StoreUnreachable(f"the vector store {problem}") from error
        if response.status == 404 and missing_is_none:
            return None
        if response.status != 200:
            asked, detail = f"{method} {path or '/'}", raw.decode(errors="replace")[:300]
            raise StoreUnreachable(f"the vector store refused {asked} ({response.status}): {detail}")
        return json.loads(raw)["result"]
