"""ObjectStore: responses, chat completions and conversations that clients left with the server, in memory."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from starlette.datastructures import QueryParams

from quire.core.errors import InvalidRequest
from quire.server.errors import ApiError
from quire.server.metrics import PREFIX

RESPONSE, CHAT, CONVERSATION = "response", "chat completion", "conversation"
MAX_LISTED = 100
_ITEM_ID_BYTES = 256  # what an entry of the index of items is charged
_HINTS = {
    RESPONSE: ", unless they were sent with store: false (--max-stored-responses keeps more)",
    CHAT: ", if they were sent with store: true (--max-stored-responses keeps more)",
    CONVERSATION: " (--max-stored-responses keeps more)",
}


@dataclass(frozen=True, slots=True)
class StoredObject:
    object_id: str
    kind: str
    owner: str | None  # the name of the key that made it; None where there are no keys
    number: int  # in the order of creation
    body: bytes  # JSON of the object without `head`
    head: Mapping[str, Any]  # the fields that lists filter by and updates change
    items: bytes  # JSON: the items or messages that belong to it
    item_ids: tuple[str, ...]  # of items that a request may refer to
    events: bytes  # of a response that ran in the background and was streamed

    @property
    def num_bytes(self) -> int:
        index = _ITEM_ID_BYTES * len(self.item_ids)
        return (
            len(self.body) + len(self.items) + len(self.events) + len(msgspec.json.encode(self.head)) + index
        )

    def shown(self) -> dict[str, Any]:
        """The object as its endpoint returns it."""
        body: dict[str, Any] = msgspec.json.decode(self.body)
        return {**body, **self.head}

    def listed_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items

    def conversation(self) -> list[dict[str, Any]]:
        """All items, the output of a response included: what another response continues."""
        output: list[dict[str, Any]] = msgspec.json.decode(self.body).get("output", [])
        return self.listed_items() + output


class ObjectStore:
    """Holds at most `max_objects` objects and `max_bytes`, each until it was unused for `max_seconds`.

    The least recently used is evicted first. An object belongs to the key that made it: to every other key it
    does not exist.
    """

    def __init__(
        self,
        max_objects: int,
        max_bytes: int,
        max_seconds: float = float("inf"),
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        registry = registry or CollectorRegistry()
        self.max_objects = max_objects
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._max_seconds = max_seconds
        self._clock = clock
        self._shown_count = Gauge(
            f"{PREFIX}stored_responses",
            "Responses, chat completions and conversations that are kept in memory.",
            registry=registry,
        )
        self._shown_bytes = Gauge(f"{PREFIX}stored_responses_bytes", "Their size.", registry=registry)
        self._stored: OrderedDict[str, StoredObject] = OrderedDict()  # the least recently used first
        self._used: dict[str, float] = {}  # when, by id
        # the object that has an item, by its owner and id; the latest, if several have it
        self._by_item: dict[tuple[str | None, str], str] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self,
        kind: str,
        owner: str | None,
        body: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
        *,
        head: Mapping[str, Any] | None = None,
        events: bytes = b"",
    ) -> bool:
        """Keeps an object, in the place of one with the same id; False if the store is too small for it."""
        object_id = body["id"]
        before = self._stored.get(object_id)
        item_ids = [item.get("id") for item in (*items, *body.get("output", ()))] if kind != CHAT else []
        stored = StoredObject(
            object_id,
            kind,
            owner,
            before.number if before is not None else self._num_made,
            msgspec.json.encode(body),
            head or {},
            msgspec.json.encode(items),
            tuple(item_id for item_id in item_ids if item_id is not None),
            events,
        )
        if stored.num_bytes > self.max_bytes or not self.max_objects:
            return False
        self._drop(object_id)
        self._num_made += 1
        self._stored[object_id] = stored
        self._used[object_id] = self._clock()
        self.num_bytes += stored.num_bytes
        self._by_item.update({(owner, item_id): object_id for item_id in stored.item_ids})
        self._evict()
        return True

    def get(self, kind: str, owner: str | None, object_id: str, param: str | None = None) -> StoredObject:
        """Raises 404 for an id that is not there, or not this owner's. `param` is the field that names it."""
        self._expire()
        stored = self._stored.get(object_id)
        if stored is None or stored.owner != owner or stored.kind != kind:
            code = "previous_response_not_found" if param == "previous_response_id" else None
            raise ApiError(
                404,
                f"there is no {kind} {object_id[:80]!r}: the server keeps the last {self.max_objects} in memory"
                f"{_HINTS[kind]}",
                param=param,
                code=code or f"{kind.replace(' ', '_')}_not_found",
            )
        self._stored.move_to_end(object_id)
        self._used[object_id] = self._clock()
        return stored

    def all_of(self, kind: str, owner: str | None) -> list[StoredObject]:
        """In the order of their creation. Does not count as a use."""
        self._expire()
        own = [stored for stored in self._stored.values() if stored.kind == kind and stored.owner == owner]
        return sorted(own, key=lambda stored: stored.number)

    def with_item(self, owner: str | None, item_id: str) -> StoredObject | None:
        """The latest object of this owner that has the item."""
        self._expire()
        return self._stored.get(self._by_item.get((owner, item_id), ""))

    def update(self, kind: str, owner: str | None, object_id: str, head: Mapping[str, Any]) -> StoredObject:
        """Changes these fields of its head."""
        before = self.get(kind, owner, object_id)
        updated = replace(before, head={**before.head, **head})
        self._stored[object_id] = updated
        self.num_bytes += updated.num_bytes - before.num_bytes
        self._evict()
        return updated

    def put_items(self, stored: StoredObject, items: Sequence[Mapping[str, Any]]) -> bool:
        """Puts these items in the place of the object's own; False, as `put`, changes nothing."""
        body = msgspec.json.decode(stored.body)
        return self.put(stored.kind, stored.owner, body, items, head=stored.head, events=stored.events)

    def delete(self, kind: str, owner: str | None, object_id: str) -> None:
        self.get(kind, owner, object_id)
        self._drop(object_id)
        self._show()

    def _evict(self) -> None:
        while len(self._stored) > self.max_objects or self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._stored)))
        self._show()

    def _expire(self) -> None:
        oldest = self._clock() - self._max_seconds
        while self._stored and self._used[object_id := next(iter(self._stored))] < oldest:
            self._drop(object_id)
            self._show()

    def _drop(self, object_id: str) -> None:
        dropped = self._stored.pop(object_id, None)
        if dropped is None:
            return
        self.num_bytes -= dropped.num_bytes
        del self._used[object_id]
        for item_id in dropped.item_ids:
            if self._by_item.get((dropped.owner, item_id)) == object_id:
                del self._by_item[dropped.owner, item_id]

    def _show(self) -> None:
        self._shown_count.set(len(self._stored))
        self._shown_bytes.set(self.num_bytes)


def check_encodable(*values: Any) -> int:
    """These values are kept or repeated as JSON: refuses half characters and nesting that cannot be written.

    Returns the number of bytes.
    """
    try:
        return len(msgspec.json.encode(values))
    except UnicodeEncodeError:
        raise InvalidRequest("the request holds half of a character: send valid Unicode") from None
    except RecursionError:
        raise InvalidRequest("the request nests too deeply: send flatter values") from None


# ---------------------------------------------------------------------- lists


def page(
    listed: Sequence[dict[str, Any]], query: QueryParams, default_order: str = "desc", what: str = "item"
) -> dict[str, Any]:
    """One page of objects that are in the order of their creation, by the query's order, after and limit."""
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order={order!r} is not known: give 'asc' or 'desc'", "order")
    limit, after = page_limit(query.get("limit", "20"), MAX_LISTED), query.get("after")
    ordered = listed if order == "asc" else listed[::-1]
    ids = [entry["id"] for entry in ordered]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after={after[:80]!r} is no {what} of this list", "after")
    start = ids.index(after) + 1 if after is not None else 0
    return list_page(ordered[start : start + limit], start + limit < len(ordered))


def list_page(data: Sequence[Mapping[str, object]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def page_limit(given: str, most: int) -> int:
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        raise InvalidRequest(f"limit={given[:40]!r} is outside 1 to {most}", "limit")
    return int(given)
