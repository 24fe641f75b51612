"""What clients leave with the server: bounded in number, bytes and time, and its key's own."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.datastructures import QueryParams

from quire.core.errors import ConfigError, InvalidRequest
from quire.server.errors import ApiError
from quire.server.settings import ServerSettings
from quire.server.stored import CHAT, CONVERSATION, RESPONSE, ObjectStore, page


def body(name: str, size: int = 1) -> Any:
    return {"id": name, "output": [{"text": "x" * size}]}


def test_the_least_recently_used_go_first():
    registry = CollectorRegistry()
    store = ObjectStore(2, 10_000, registry=registry)
    store.put(RESPONSE, None, body("a"), [])
    store.put(RESPONSE, None, body("b"), [{"id": "i"}])
    assert store.get(RESPONSE, None, "a").conversation() == [{"text": "x"}]
    store.put(RESPONSE, None, body("c"), [])
    with pytest.raises(ApiError, match="no response 'b'") as caught:
        store.get(RESPONSE, None, "b", "previous_response_id")
    assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    assert [len(store), store.get(RESPONSE, None, "a").owner] == [2, None]
    assert registry.get_sample_value("quire_stored_responses") == 2
    assert store.with_item(None, "i") is None


def test_bytes_are_bounded_and_counted_back():
    store = ObjectStore(100, 1000)
    for index in range(10):
        store.put(RESPONSE, None, body(str(index), 300), [])
        assert store.num_bytes <= 1000
    assert len(store) == 2
    assert not store.put(RESPONSE, None, body("large", 2000), [])
    assert len(store) == 2
    store.put(RESPONSE, None, body("9", 10), [])  # again, smaller
    store.delete(RESPONSE, None, "8")
    store.delete(RESPONSE, None, "9")
    assert (len(store), store.num_bytes) == (0, 0)
    nothing = ObjectStore(0, 1000)
    nothing.put(RESPONSE, None, body("a"), [])
    assert len(nothing) == 0


def test_an_update_and_the_index_of_items_count_as_bytes():
    store = ObjectStore(100, 2000)
    store.put(CHAT, None, {"id": "a"}, [], head={"metadata": {}})
    store.put(CHAT, None, {"id": "b"}, [], head={"metadata": {}})
    assert store.update(CHAT, None, "b", {"metadata": {"k": "v" * 1900}}).shown()["metadata"]["k"]
    assert store.num_bytes <= 2000
    store.update(CHAT, None, "b", {"metadata": {"k": "v" * 1980}})
    assert [one.object_id for one in store.all_of(CHAT, None)] == []
    assert not store.put(CONVERSATION, None, {"id": "c"}, [{"id": str(index)} for index in range(8)])
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_is_not_used_for_long_is_gone():
    now = [0.0]
    store = ObjectStore(10, 1000, 60.0, clock=lambda: now[0])
    store.put(RESPONSE, None, body("a"), [])
    store.put(RESPONSE, None, body("b"), [])
    now[0] = 50.0
    store.get(RESPONSE, None, "a")
    now[0] = 70.0
    with pytest.raises(ApiError):
        store.get(RESPONSE, None, "b")
    assert store.get(RESPONSE, None, "a")
    now[0] = 140.0
    assert store.all_of(RESPONSE, None) == []
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_of_less_than_nothing_is_refused():
    for name in ("max_stored_responses", "max_stored_responses_bytes", "max_stored_responses_seconds"):
        with pytest.raises(ConfigError, match=name):
            ServerSettings(**{name: -1})


def test_an_object_is_its_keys_own():
    store = ObjectStore(10, 10_000)
    store.put(RESPONSE, "key-1", body("a"), [{"id": "i"}])
    store.put(RESPONSE, "key-2", body("b"), [{"id": "i"}])  # an id that another key has chosen as well
    for other in ("key-2", None):
        with pytest.raises(ApiError):
            store.get(RESPONSE, other, "a")
        with pytest.raises(ApiError):
            store.delete(RESPONSE, other, "a")
    with pytest.raises(ApiError, match="no chat completion 'a'"):
        store.get(CHAT, "key-1", "a")
    assert store.get(RESPONSE, "key-1", "a")
    shown = [store.with_item(key, "i") for key in ("key-1", "key-2", None)]
    assert [one and one.object_id for one in shown] == ["a", "b", None]


def test_a_page_goes_on_where_the_last_one_ended():
    listed = [{"id": str(index)} for index in range(5)]

    def ids(query: str) -> tuple[list[str], bool]:
        shown = page(listed, QueryParams(query))
        return [one["id"] for one in shown["data"]], shown["has_more"]

    assert ids("limit=2") == (["4", "3"], True)
    assert ids("limit=2&after=1") == (["0"], False)
    assert ids("order=asc&after=2") == (["3", "4"], False)
    for wrong in (
        "limit=0",
        "limit=101",
        "limit=000000001999",
        "limit=000000001" + "9" * 5000,
        "limit=x",
        "order=up",
        "after=9",
    ):
        with pytest.raises(InvalidRequest):
            ids(wrong)
