"""Pages of lists: what a request's query asks for, and what is returned."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.datastructures import QueryParams

from quire.core.errors import InvalidRequest
from quire.rag.database import PageQuery
from quire.server.stored import page_limit

T = TypeVar("T")
MAX_CURSOR = 128  # characters


def page_query(query: QueryParams, most: int = 100, default: int = 20, **names: str) -> PageQuery:
    """`names` has the API's own names of `after` and `before`, if they differ."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order={order[:40]!r} is not known: give 'asc' or 'desc'", "order")
    cursors = {field: query.get(names.get(field, field)) for field in ("after", "before")}
    for field, cursor in cursors.items():
        if cursor is not None and len(cursor) > MAX_CURSOR:
            raise InvalidRequest(f"{field}={cursor[:40]!r}… is no id", field)
    return PageQuery(page_limit(query.get("limit", str(default)), most), order, **cursors)


def shown_page(listed: Sequence[T], has_more: bool, show: Callable[[T], Any]) -> dict[str, Any]:
    data = [show(entry) for entry in listed]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
