"""POST, GET and DELETE /v1/responses."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.access import context_of
from quire.server.protocol.base import Deleted, InputTokens
from quire.server.protocol.responses import (
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
from quire.server.stored import RESPONSE, ObjectStore, check_encodable, page
from quire.server.translation import (
    TranslatedEvents,
    build_whole,
    translated_chat,
    translated_prompt,
)


def responses_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["responses"])
    store = service.store

    @router.post("/v1/responses", responses={**answers(ResponseObject, ResponseEvent), **ERRORS})
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answers a conversation, whole or in typed events, and keeps the answer."""
        owner = context_of(request).key
        items = _conversation(body, owner, store)
        check_encodable(items, body.tools, body.tool_choice, body.text and body.text.format)
        fields = chat_fields(body, await _within(service, body, items))
        reply = await translated_chat(service, request, fields, NAMES)
        keep = body.store is not False and store.max_objects > 0
        response_id = f"resp_{reply.response_id.removeprefix('chatcmpl-')}"
        recommended = service.model_named(body.model).ready.default_sampling
        builder = ResponseBuilder(new_response(body, response_id, reply.model, keep, recommended))

        def on_end() -> None:
            if keep:
                store.put(RESPONSE, owner, builder.response, items)

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
        stored = store.get(RESPONSE, context_of(request).key, response_id)
        return Response(stored.body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", responses={**answers(Deleted), **ERRORS})
    async def delete_response(response_id: str, request: Request) -> Response:
        """Deletes a response. Responses that continued it keep their own copy of the conversation."""
        store.delete(RESPONSE, context_of(request).key, response_id)
        gone: Deleted = {"id": response_id, "object": "response", "deleted": True}
        return JsonReply(gone)

    @router.get("/v1/responses/{response_id}/input_items", responses={**answers(ItemList), **ERRORS})
    async def list_input_items(response_id: str, request: Request) -> Response:
        """A response's input and the conversation before it, newest first."""
        items = store.get(RESPONSE, context_of(request).key, response_id).listed_items()
        return JsonReply(page(items, request.query_params))

    return router


def _conversation(body: ResponseInput, owner: str | None, store: ObjectStore) -> list[Item]:
    """The whole conversation: up to the previous response, its output, and the new input."""
    refuse_unsupported(body)
    items = read_items(body.input)
    if body.previous_response_id is None:
        return items
    previous = store.get(RESPONSE, owner, body.previous_response_id, "previous_response_id")
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
