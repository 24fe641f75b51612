"""ServerIndex against a stand-in for Qdrant's server: requests have the API's form, results are the exact ones."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
import pytest
from rag.test_filters import RandomFilters

from quire.core.errors import ConfigError
from quire.rag.filters import parse_filter
from quire.rag.index import open_index
from quire.rag.qdrant_server import ServerIndex, StoreUnreachable
from quire.rag.ranking import IndexFault, IndexQuery, Point
from quire.rag.stores import NewStoreFile
from tests.rag.ingesting import DataFolder, HashEncoder, ingest_all, vector_of


class Collection:
    """As much of a collection as the index uses, by brute force."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.points, self.schema = config, {}, {}  # type: ignore[var-annotated]

    def score(self, point: dict[str, Any], body: dict[str, Any]) -> float | None:
        vector = point["vector"][body["using"]]
        if body["using"] == "dense":
            query = numpy.array(body["query"][0])
            return max(
                float(query @ row) / math.hypot(*row) / math.hypot(*query) for row in numpy.array(vector)
            )
        weights = dict(zip(vector["indices"], vector["values"], strict=True))
        total = 0.0
        for index in body["query"]["indices"]:
            holding = sum(index in other["vector"]["words"]["indices"] for other in self.points.values())
            rarity = math.log(1 + (len(self.points) - holding + 0.5) / (holding + 0.5))
            total += rarity * weights.get(index, 0.0)
        return total or None

    def matches(self, point: dict[str, Any], terms: dict[str, Any]) -> bool:
        if "has_id" in terms:
            return point["id"] in terms["has_id"]
        if "key" in terms:
            value = point["payload"].get(terms["key"])
            if "match" in terms:
                return bool(value == terms["match"]["value"])
            signs = {"gt": "__gt__", "gte": "__ge__", "lt": "__lt__", "lte": "__le__"}
            return value is not None and all(
                getattr(float(value), signs[name])(limit) for name, limit in terms["range"].items()
            )
        inside = {name: [self.matches(point, part) for part in parts] for name, parts in terms.items()}
        should = inside.get("should")
        return (
            all(inside.get("must", []))
            and not any(inside.get("must_not", []))
            and (not should or any(should))
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet, not one that waits for an acknowledgement
    collections: dict[str, Collection]

    def log_message(self, *_: Any) -> None: ...

    def handle_any(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        _, _, name, *rest = self.path.partition("?")[0].split("/")
        status, result = self.result(name, "/".join(rest), body)
        content = json.dumps({"result": result, "status": "ok"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = handle_any

    def result(self, name: str, rest: str, body: Any) -> tuple[int, Any]:
        collection = self.collections.get(name)
        if collection is None:
            if self.command == "PUT" and rest == "":
                self.collections[name] = Collection(body)
                return 200, True
            return 404, None
        match (self.command, rest):
            case ("GET", ""):
                return 200, {"config": {"params": collection.config}, "payload_schema": collection.schema}
            case ("DELETE", ""):
                del self.collections[name]
            case ("PUT", "points"):
                collection.points |= {point["id"]: point for point in body["points"]}
            case ("POST", "points/delete"):
                for one in body["points"]:
                    collection.points.pop(one, None)
            case ("PUT", "points/payload"):
                for one in body["points"]:
                    collection.points[one]["payload"] = body["payload"]
            case ("PUT", "index"):
                collection.schema[body["field_name"]] = {"data_type": body["field_schema"]}
            case ("POST", "points/count"):
                return 200, {"count": len(collection.points)}
            case ("POST", "points/query"):
                left = [
                    p for p in collection.points.values() if collection.matches(p, body.get("filter", {}))
                ]
                scored = [(collection.score(point, body), point["id"]) for point in left]
                best = sorted((pair for pair in scored if pair[0] is not None), reverse=True)[: body["limit"]]
                return 200, {"points": [{"id": one, "score": score} for score, one in best]}
            case _:
                return 400, None
        return 200, {"status": "completed"}


@pytest.fixture
def url() -> Iterator[str]:
    kind = type("Stand-in", (Handler,), {"collections": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"qdrant://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_it_finds_what_the_exact_index_finds(url: str) -> None:
    made = RandomFilters(seed=1)
    random = numpy.random.default_rng(2)
    points = [
        Point(
            n, list(random.normal(size=(2, 8)).astype(numpy.float32)), f"word{n % 7} stone", made.attributes()
        )
        for n in range(1, 31)
    ]
    server, exact = ServerIndex(url, "a b/c", 8), open_index(None, 8)
    for index in (server, exact):
        index.upsert(points)
        index.delete([3])
        index.set_attributes([4, 5], {"a": 1.0})
    assert len(server) == len(exact) == 29
    for _ in range(100):
        wanted = parse_filter(made.filter())
        vector = random.normal(size=8).astype(numpy.float32)
        by_vector = [
            index.search(IndexQuery(vector, "", 30, wanted, ranker="none")) for index in (server, exact)
        ]
        assert [hit.chunk_id for hit in by_vector[0]] == [hit.chunk_id for hit in by_vector[1]]
    hits = server.search(IndexQuery(vector, "word2 stones", 3, embedding_weight=0.0))
    assert {hit.chunk_id % 7 for hit in hits} == {2}
    server.close()
    again = ServerIndex(url, "a b/c", 8)  # the collection and its fields are there
    assert len(again) == 29
    with pytest.raises(IndexFault, match="for vectors of 8 numbers, not 16"):
        ServerIndex(url, "a b/c", 16)
    again.close()


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StoreUnreachable, match=r"the vector store at 127\.0\.0\.1:9 does not answer"):
        ServerIndex("qdrant://127.0.0.1:9", "a", 8)
    for wrong in ("http://host:6333", "host", "qdrant://"):
        with pytest.raises(ConfigError, match="is no address: write qdrant://host:6333"):
            ServerIndex(wrong, "a", 8)


def test_vector_stores_keep_their_indexes_there(url: str, tmp_path: Path) -> None:
    """A collection for each store, built again where it does not fit the record, deleted with its store."""
    data = DataFolder(tmp_path, url)
    store = data.stores.create("me", "store", None, {}, None)
    path = data.files.temporary()
    path.write_text("a text about stones")
    file = data.files.add("me", path, "a.txt", "assistants")
    data.stores.add_files(store, [NewStoreFile(file.id, {}, 100, 0)])
    asyncio.run(ingest_all(data, HashEncoder()))
    vector = numpy.frombuffer(vector_of("a text about stones"), dtype=numpy.float32)

    def found(folder: DataFolder) -> list[str]:
        known = folder.stores.get("me", store.id)
        hits = folder.stores.search(known, IndexQuery(vector, "stones", 5))
        return [hit.text for hit in hits]

    assert found(data) == ["a text about stones"]
    data.close()
    collection = ServerIndex(url, store.id, len(vector))
    assert len(collection) == 1
    collection.drop()
    again = DataFolder(tmp_path, url)
    assert found(again) == ["a text about stones"]
    again.stores.delete("me", store.id)
    assert len(ServerIndex(url, store.id, len(vector))) == 0  # made again by this call
    again.close()
