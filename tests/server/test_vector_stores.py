"""/v1/vector_stores with OpenAI's client: stores, their files, batches of files, and searches."""

from typing import Any

import openai
import pytest

from quire.server.retrieval.search import REWRITE_TOKENS
from tests.server.running import RunningServer

TEXTS = {
    "grok.txt": "Grok-0 is the first language model of xAI. It has 33 billion parameters.",
    "paris.md": "# Paris\n\nParis is the capital of France and lies on the Seine.",
    "tea.txt": "Green tea is brewed with water of eighty degrees for three minutes.",
}


@pytest.fixture
def client(data_server: RunningServer) -> openai.OpenAI:
    return data_server.client(api_key="alice")


@pytest.fixture(scope="module")
def filled(data_server: RunningServer) -> tuple[str, dict[str, str]]:
    """A store with the texts, and their file ids by name."""
    client = data_server.client(api_key="alice")
    store = client.vector_stores.create(name="filled", metadata={"made": "by a test"})
    ids = {}
    for number, (name, text) in enumerate(TEXTS.items()):
        file = client.files.create(file=(name, text.encode()), purpose="assistants")
        ids[name] = file.id
        client.vector_stores.files.create(
            store.id, file_id=file.id, attributes={"kind": name.rpartition(".")[2], "number": number}
        )
    for file_id in ids.values():
        done = client.vector_stores.files.poll(file_id, vector_store_id=store.id, poll_interval_ms=50)
        assert done.status == "completed", done.last_error
    return store.id, ids


def upload(client: openai.OpenAI, name: str, text: str) -> str:
    return client.files.create(file=(name, text.encode()), purpose="assistants").id


def test_every_method_of_stores(client: openai.OpenAI) -> None:
    expiry = {"anchor": "last_active_at", "days": 3}
    store = client.vector_stores.create(name="first", description="a store", expires_after=expiry)
    assert (store.object, store.status, store.usage_bytes) == ("vector_store", "completed", 0)
    assert store.expires_at == (store.last_active_at or 0) + 3 * 86400
    assert client.vector_stores.retrieve(store.id) == store
    changed = client.vector_stores.update(store.id, name="second", metadata={"a": "b"}, expires_after=None)
    assert (changed.name, changed.metadata, changed.expires_at) == ("second", {"a": "b"}, None)
    other = client.vector_stores.create()
    listed = [entry.id for entry in client.vector_stores.list(limit=1)]
    assert listed.index(other.id) < listed.index(store.id)
    page = client.vector_stores.list(limit=1, order="desc", before=store.id)
    assert [entry.id for entry in page.data] == [other.id]
    assert client.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no vector store"):
        client.vector_stores.retrieve(store.id)


def test_every_method_of_store_files(client: openai.OpenAI) -> None:
    store = client.vector_stores.create(name="files")
    file_id = upload(client, "a.txt", "word " * 300)
    static = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 20}}
    added = client.vector_stores.files.create(
        store.id, file_id=file_id, attributes={"x": "y"}, chunking_strategy=static
    )
    assert (added.object, added.vector_store_id) == ("vector_store.file", store.id)
    done = client.vector_stores.files.poll(file_id, vector_store_id=store.id, poll_interval_ms=50)
    assert (done.status, done.last_error, done.attributes) == ("completed", None, {"x": "y"})
    assert done.chunking_strategy is not None
    assert done.chunking_strategy.to_dict() == static
    again = client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("b.txt", b"another text"), poll_interval_ms=50
    )
    assert again.status == "completed"
    listed = [file.id for file in client.vector_stores.files.list(store.id, limit=1, order="asc")]
    assert listed == [file_id, again.id]
    assert [file.id for file in client.vector_stores.files.list(store.id, filter="failed")] == []
    changed = client.vector_stores.files.update(file_id, vector_store_id=store.id, attributes={"n": 5})
    assert changed.attributes == {"n": 5}
    content = client.vector_stores.files.content(again.id, vector_store_id=store.id)
    assert [part.text for part in content] == ["another text"]
    assert client.vector_stores.files.delete(again.id, vector_store_id=store.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.retrieve(again.id, vector_store_id=store.id)
    assert client.files.retrieve(again.id)  # the file itself stays
    counts = client.vector_stores.retrieve(store.id).file_counts
    assert (counts.completed, counts.total) == (1, 1)


def test_every_method_of_file_batches(client: openai.OpenAI) -> None:
    store = client.vector_stores.create(name="batches")
    ids = [upload(client, f"{number}.txt", f"text number {number}") for number in range(3)]
    ids.append(upload(client, "bad.exe", "\x7fELF"))
    batch = client.vector_stores.file_batches.create_and_poll(
        store.id, file_ids=ids, attributes={"a": 1}, poll_interval_ms=50
    )
    assert (batch.object, batch.status) == ("vector_store.files_batch", "completed")
    assert (batch.file_counts.completed, batch.file_counts.failed, batch.file_counts.total) == (3, 1, 4)
    files = client.vector_stores.file_batches
    assert files.retrieve(batch.id, vector_store_id=store.id) == batch
    listed = files.list_files(batch.id, vector_store_id=store.id, limit=2, order="asc")
    assert [file.id for file in listed] == ids
    failed = files.list_files(batch.id, vector_store_id=store.id, filter="failed").data
    assert [file.last_error.code for file in failed if file.last_error] == ["unsupported_file"]
    uploaded = files.upload_and_poll(store.id, files=[("x.txt", b"x y z")], poll_interval_ms=50)
    assert uploaded.file_counts.completed == 1
    each = [{"file_id": ids[0], "attributes": {"who": "first"}}, {"file_id": ids[1]}]
    second = files.create_and_poll(store.id, files=each, poll_interval_ms=50)
    assert second.file_counts.completed == 2
    known = client.vector_stores.files.retrieve(ids[0], vector_store_id=store.id)
    assert known.attributes == {"who": "first"}
    late = files.create(store.id, file_ids=[upload(client, "long.txt", "words " * 40_000)])
    cancelled = files.cancel(late.id, vector_store_id=store.id)
    assert (cancelled.status, cancelled.file_counts.cancelled) == ("cancelled", 1)


# ---------------------------------------------------------------------- searches


def test_a_search_finds_the_passage(client: openai.OpenAI, filled: tuple[str, dict[str, str]]) -> None:
    store_id, ids = filled
    page = client.vector_stores.search(store_id, query="How many parameters does Grok-0 have?")
    best = page.data[0]
    assert (best.file_id, best.filename) == (ids["grok.txt"], "grok.txt")
    assert best.content[0].text == TEXTS["grok.txt"]
    assert best.attributes == {"kind": "txt", "number": 0}
    assert 0 <= page.data[-1].score <= best.score <= 1
    assert len(client.vector_stores.search(store_id, query="tea", max_num_results=1).data) == 1
    both = client.vector_stores.search(store_id, query=["capital of France", "hot drinks"]).data
    assert {result.filename for result in both[:2]} == {"paris.md", "tea.txt"}


def test_a_query_is_rewritten(client: openai.OpenAI, filled: tuple[str, dict[str, str]]) -> None:
    asked = "hello, please tell me how many parameters the model Grok-0 has, if you know it!"
    page = client.vector_stores.search(filled[0], query=asked, rewrite_query=True)
    (searched,) = page.to_dict()["search_query"]  # type: ignore[misc]
    assert searched != asked
    assert len(searched.split()) <= REWRITE_TOKENS
    plain = client.vector_stores.search(filled[0], query=asked)
    assert plain.to_dict()["search_query"] == [asked]


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"type": "eq", "key": "kind", "value": "md"}, {"paris.md"}),
        ({"type": "gte", "key": "number", "value": 1}, {"paris.md", "tea.txt"}),
        ({"type": "in", "key": "number", "value": [0, 2]}, {"grok.txt", "tea.txt"}),
        (
            {
                "type": "and",
                "filters": [
                    {"type": "eq", "key": "kind", "value": "txt"},
                    {"type": "ne", "key": "number", "value": 0},
                ],
            },
            {"tea.txt"},
        ),
    ],
)
def test_filters_choose_by_attributes(
    client: openai.OpenAI, filled: tuple[str, dict[str, str]], filters: Any, names: set[str]
) -> None:
    results = client.vector_stores.search(filled[0], query="tea in Paris", filters=filters)
    assert {result.filename for result in results} == names


def test_rankers_and_thresholds(client: openai.OpenAI, filled: tuple[str, dict[str, str]]) -> None:
    search, query = client.vector_stores.search, "the capital of France"
    dense = search(filled[0], query=query, ranking_options={"ranker": "none", "score_threshold": 0.4})
    assert [result.filename for result in dense] == ["paris.md"]
    words: Any = {"hybrid_search": {"embedding_weight": 0.0, "text_weight": 1.0}}
    assert search(filled[0], query="billion", ranking_options=words).data[0].filename == "grok.txt"
    with pytest.raises(openai.NotFoundError, match="'cross' does not exist"):
        search(filled[0], query=query, ranking_options={"ranker": "cross"})  # type: ignore[typeddict-item]
    with pytest.raises(openai.BadRequestError, match="is no cross-encoder"):
        search(filled[0], query=query, ranking_options={"ranker": "all-MiniLM-L6-v2"})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": ""}, "query"),
        ({"query": "x" * 9000}, "query"),
        ({"query": []}, "query"),
        ({"query": ["x"] * 17}, "query"),
        ({"query": "x", "max_num_results": 51}, "max_num_results"),
        ({"query": "x", "filters": {"type": "like", "key": "a", "value": "b"}}, "filters.type is 'like'"),
        ({"query": "x", "filters": {"type": "and", "filters": [{}]}}, "filters.filters[0].type"),
        ({"query": "x", "ranking_options": {"score_threshold": 2}}, "score_threshold"),
        (
            {"query": "x", "ranking_options": {"hybrid_search": {"embedding_weight": 0, "text_weight": 0}}},
            "0 and 0",
        ),
    ],
)
def test_wrong_searches_name_the_field(
    data_server: RunningServer, filled: tuple[str, dict[str, str]], body: dict[str, Any], message: str
) -> None:
    headers = {"Authorization": "Bearer alice"}
    error = data_server.error(f"/v1/vector_stores/{filled[0]}/search", 400, json=body, headers=headers)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("", {"metadata": {"a": "x" * 600}}, "metadata"),
        ("", {"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after"),
        ("", {"file_ids": ["x"] * 2001}, "file_ids"),
        ("/{id}/files", {"file_id": "{file}", "attributes": {"a": [1]}}, "attributes"),
        ("/{id}/files", {"file_id": "{file}", "attributes": {str(n): 1 for n in range(17)}}, "16"),
        ("/{id}/files", {"file_id": "{file}", "chunking_strategy": {"type": "static"}}, "needs static"),
        (
            "/{id}/files",
            {
                "file_id": "{file}",
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51},
                },
            },
            "more than half",
        ),
        ("/{id}/file_batches", {}, "either file_ids or files"),
    ],
)
def test_wrong_stores_and_files_are_refused(
    data_server: RunningServer, filled: tuple[str, dict[str, str]], path: str, body: Any, message: str
) -> None:
    store_id, ids = filled
    if body.get("file_id") == "{file}":
        body = {**body, "file_id": ids["tea.txt"]}
    url = "/v1/vector_stores" + path.replace("{id}", store_id)
    error = data_server.error(url, 400, json=body, headers={"Authorization": "Bearer alice"})
    assert message in error["message"]


def test_another_key_sees_no_store(
    data_server: RunningServer, client: openai.OpenAI, filled: tuple[str, dict[str, str]]
) -> None:
    store_id, ids = filled
    bob = data_server.client(api_key="bob")
    assert store_id not in [store.id for store in bob.vector_stores.list()]
    own = bob.vector_stores.create(name="bob's")
    calls = [
        lambda: bob.vector_stores.retrieve(store_id),
        lambda: bob.vector_stores.update(store_id, name="mine"),
        lambda: bob.vector_stores.delete(store_id),
        lambda: bob.vector_stores.search(store_id, query="tea"),
        lambda: bob.vector_stores.files.list(store_id),
        lambda: bob.vector_stores.files.content(ids["tea.txt"], vector_store_id=store_id),
        lambda: bob.vector_stores.files.create(own.id, file_id=ids["tea.txt"]),
        lambda: bob.vector_stores.file_batches.create(own.id, file_ids=[ids["tea.txt"]]),
        lambda: bob.responses.create(
            input="tea?", tools=[{"type": "file_search", "vector_store_ids": [store_id]}], model="x"
        ),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call()


def test_a_deleted_file_is_found_no_more(client: openai.OpenAI) -> None:
    file_id = upload(client, "gone.txt", "The zebra has stripes.")
    store = client.vector_stores.create(name="gone", file_ids=[file_id])
    client.vector_stores.files.poll(file_id, vector_store_id=store.id, poll_interval_ms=50)
    assert client.vector_stores.search(store.id, query="zebra").data
    client.files.delete(file_id)
    assert client.vector_stores.search(store.id, query="zebra").data == []
    assert client.vector_stores.retrieve(store.id).file_counts.total == 0
