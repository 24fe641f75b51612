"""ResponseStore: finished responses, kept in memory as JSON until they are evicted."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from quire.server.errors import ApiError
from quire.server.metrics import PREFIX
from quire.server.protocol.responses import Item, ResponseObject


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Holds its whole conversation, so that it can be continued when what came before is gone."""

    owner: str | None  # the name of the key that made it; None where there are no keys
    response: bytes  # ResponseObject as JSON
    items: bytes  # a list of Item as JSON: the conversation before its output

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)

    def input_items(self) -> list[Item]:
        items: list[Item] = msgspec.json.decode(self.items)
        return items

    def conversation(self) -> list[Item]:
        """The conversation that another response continues."""
        output: list[Item] = msgspec.json.decode(self.response)["output"]
        return self.input_items() + output


class ResponseStore:
    """Holds at most `max_responses` responses and `max_bytes` of JSON; evicts the least recently used.

    A response belongs to the key that made it: to every other key it does not exist.
    """

    def __init__(self, max_responses: int, max_bytes: int, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._shown_count = Gauge(
            f"{PREFIX}stored_responses", "Responses that are kept in memory.", registry=registry
        )
        self._shown_bytes = Gauge(f"{PREFIX}stored_responses_bytes", "Their size.", registry=registry)
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str | None, response: ResponseObject, items: Sequence[Item]) -> None:
        """Keeps a response; one that is larger than the whole store is not kept."""
        stored = StoredResponse(owner, msgspec.json.encode(response), msgspec.json.encode(items))
        self._drop(response["id"])
        if stored.num_bytes > self.max_bytes or not self.max_responses:
            return
        self._stored[response["id"]] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self.max_responses or self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._stored)))
        self._show()

    def get(self, owner: str | None, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises 404 for an id that is not there, or not this owner's."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"there is no response {response_id[:80]!r}: the server keeps the last {self.max_responses} in memory, "
                "unless they were sent with store: false (--max-stored-responses keeps more)",
                param=param,
                code="previous_response_not_found" if param is not None else "response_not_found",
            )
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, owner: str | None, response_id: str) -> None:
        self.get(owner, response_id)
        self._drop(response_id)
        self._show()

    def _drop(self, response_id: str) -> None:
        dropped = self._stored.pop(response_id, None)
        if dropped is not None:
            self.num_bytes -= dropped.num_bytes

    def _show(self) -> None:
        self._shown_count.set(len(self._stored))
        self._shown_bytes.set(self.num_bytes)
