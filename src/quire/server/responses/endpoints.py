"""POST, GET and DELETE /v1/responses, and the store of finished responses."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Gauge
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.access import context_of
from quire.server.errors import ApiError
from quire.server.metrics import PREFIX
from quire.server.protocol.responses import (
    DeletedResponse,
    InputTokens,
    Item,
    ItemList,
    ResponseEvent,
    ResponseInput,
    ResponseObject,
    ResponseRequest,
)
from quire.server.reply import ERRORS, EventStream, JsonReply, answers
from quire.server.responses.builder import ResponseBuilder, new_response
from quire.server.responses.convert_request import (
    NAMES,
    chat_fields,
    prompt_fields,
    read_items,
    refuse_unsupported,
)
from quire.server.service import Service
from quire.server.translation import (
    TranslatedEvents,
    build_whole,
    check_encodable,
    translated_chat,
    translated_prompt,
)

MAX_LISTED = 100


def responses_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["responses"])
    settings = service.settings
    store = ResponseStore(
        settings.max_stored_responses, settings.max_stored_responses_bytes, service.metrics.registry
    )

    @router.post("/v1/responses", responses={**answers(ResponseObject, ResponseEvent), **ERRORS})
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answers a conversation, whole or in typed events, and keeps the answer."""
        owner = context_of(request).key
        items = _conversation(body, owner, store)
        check_encodable(items, body.tools, body.tool_choice, body.text and body.text.format)
        fields = chat_fields(body, await _within(service, body, items))
        reply = await translated_chat(service, request, fields, NAMES)
        keep = body.store is not False and store.max_responses > 0
        response_id = f"resp_{reply.response_id.removeprefix('chatcmpl-')}"
        recommended = service.model_named(body.model).ready.default_sampling
        builder = ResponseBuilder(new_response(body, response_id, reply.model, keep, recommended))

        def on_end() -> None:
            if keep:
                store.put(owner, builder.response, items)

        if body.stream:
            return EventStream(TranslatedEvents(reply, builder, NAMES, on_end), reply.response_id)
        await build_whole(reply, builder, NAMES)
        on_end()
        return JsonReply(builder.response)

    @router.post("/v1/responses/input_tokens", responses={**answers(InputTokens), **ERRORS})
    async def count_input_tokens(body: ResponseInput, request: Request) -> Response:
        """How many tokens a response's prompt would have."""
        items = _conversation(body, context_of(request).key, store)
        prompt = await translated_prompt(service, prompt_fields(body, items), NAMES)
        count: InputTokens = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        return JsonReply(count)

    @router.get("/v1/responses/{response_id}", responses={**answers(ResponseObject), **ERRORS})
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """A response that is kept."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise InvalidRequest("a response that has ended cannot be streamed: leave stream out", "stream")
        stored = store.get(context_of(request).key, response_id)
        return Response(stored.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", responses={**answers(DeletedResponse), **ERRORS})
    async def delete_response(response_id: str, request: Request) -> Response:
        """Deletes a response. Responses that continued it keep their own copy of the conversation."""
        store.delete(context_of(request).key, response_id)
        gone: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return JsonReply(gone)

    @router.get("/v1/responses/{response_id}/input_items", responses={**answers(ItemList), **ERRORS})
    async def list_input_items(response_id: str, request: Request) -> Response:
        """A response's input and the conversation before it, newest first."""
        query = request.query_params
        items = store.get(context_of(request).key, response_id).input_items()
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order={order!r} is not known: give 'asc' or 'desc'", "order")
        ordered = items if order == "asc" else items[::-1]
        return JsonReply(_page(ordered, query.get("after"), _limit(query.get("limit", "20"))))

    return router


def _conversation(body: ResponseInput, owner: str | None, store: "ResponseStore") -> list[Item]:
    """The whole conversation: up to the previous response, its output, and the new input."""
    refuse_unsupported(body)
    items = read_items(body.input)
    if body.previous_response_id is None:
        return items
    previous = store.get(owner, body.previous_response_id, "previous_response_id")
    return previous.conversation() + items


async def _within(service: Service, body: ResponseRequest, items: list[Item]) -> list[Item]:
    """The items that fit the context, if the oldest may be left out for that."""
    if body.truncation != "auto":
        return items
    service.check_room()  # counting is work
    limit = service.model_named(body.model).ready.max_model_len

    async def count(some: list[Item]) -> int:
        return len((await translated_prompt(service, prompt_fields(body, some), NAMES)).token_ids)

    return await drop_oldest_turns(items, max(1, limit - (body.max_output_tokens or 1)), count)


def _limit(given: str) -> int:
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= MAX_LISTED):
        raise InvalidRequest(f"limit={given[:40]!r} is outside 1 to {MAX_LISTED}", "limit")
    return int(given)


def _page(items: list[Item], after: str | None, limit: int) -> ItemList:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after={after[:80]!r} is no item of this response", "after")
    start = ids.index(after) + 1 if after is not None else 0
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(items),
    }


# ---------------------------------------------------------------------- truncation: auto

Counted = Callable[[list[Item]], Awaitable[int]]  # the tokens of a prompt with these items


async def drop_oldest_turns(items: list[Item], room: int, count: Counted) -> list[Item]:
    """The items without as many of the oldest turns as it takes to fit; never without the last.

    A turn begins with what a user says, so that no tool's output is left without its call. System messages
    before the first turn stay.
    """
    if await count(items) <= room:
        return items
    starts = [index for index, item in enumerate(items) if item.get("role") == "user"]
    if len(starts) < 2:
        return items  # the request is then refused as too long
    head = [item for item in items[: starts[0]] if item.get("role") in ("system", "developer")]
    first, last = 1, len(starts) - 1
    while first < last:  # dropping more can only make it shorter
        middle = (first + last) // 2
        if await count([*head, *items[starts[middle] :]]) <= room:
            last = middle
        else:
            first = middle + 1
    return [*head, *items[starts[first] :]]


# ---------------------------------------------------------------------- store


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
