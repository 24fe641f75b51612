"""POST, GET and DELETE /v1/responses; POST /v1/responses/compact, which sums a long conversation up."""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.access import context_of, warn_without_effect
from quire.server.chat import answer_chat
from quire.server.conversations import MAX_CONVERSATION_BYTES, ItemFinder, add_items
from quire.server.errors import ApiError, not_supported
from quire.server.protocol.base import Deleted, InputTokens
from quire.server.protocol.responses import (
    RESPONSE_WITHOUT_EFFECT,
    CompactedResponse,
    ConversationInput,
    Item,
    ItemList,
    ResponseEvent,
    ResponseInput,
    ResponseObject,
    ResponseRequest,
)
from quire.server.reply import EventStream, JsonReply, answers
from quire.server.responses.background import (
    BackgroundResponses,
    EventLog,
    FollowedEvents,
    RunningResponse,
    ended_log,
    stay,
)
from quire.server.responses.builder import ResponseBuilder, ResponseSearch, new_response, response_usage
from quire.server.responses.convert_request import (
    NAMES,
    chat_fields,
    chat_messages,
    conversation_id,
    new_id,
    prompt_fields,
    read_items,
    refuse_unsupported,
    write_summary,
)
from quire.server.retrieval import has_file_search
from quire.server.service import Service
from quire.server.stored import CONVERSATION, RESPONSE, ObjectStore, check_encodable, page
from quire.server.translation import (
    TranslatedEvents,
    build_whole,
    num_prompt_tokens,
    translated_chat,
)

MAX_SUMMARY_TOKENS = 1024
_REQUEST = (
    "Summarise this conversation for the assistant that will continue it. Keep facts, decisions, names, numbers, "
    "results of tools and open questions. Write only the summary."
)


def responses_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["responses"])
    store = service.store
    background = BackgroundResponses(store.max_bytes)
    _add_compact(router, service)  # before paths that have an id in its place

    @router.post("/v1/responses", responses=answers(ResponseObject, ResponseEvent))
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answers a conversation, whole or in typed events, and keeps the answer."""
        warn_without_effect(request, body, RESPONSE_WITHOUT_EFFECT)
        read = read_conversation(store, request, body, background)
        nested = [vars(fields) for fields in (body.text, body.reasoning) if fields is not None]
        num_bytes = check_encodable(read.items, body.tools, body.tool_choice, body.instructions, nested)
        keep = body.store is not False and store.max_objects > 0
        receive = request.receive
        if body.background:
            _check_background(keep, body)
            background.check_room(num_bytes)
            request = Request(request.scope, stay)
        fields = chat_fields(body, await _within(service, body, read.items))
        search: ResponseSearch | None = None
        if has_file_search(body.tools):
            search = (await service.retrieval.opened()).file_search.of_response(body.include or ())
        answer = answer_chat if search is None else search.answer_chat
        reply = await translated_chat(service, request, fields, NAMES, answer)
        response_id = f"resp_{reply.response_id.removeprefix('chatcmpl-')}"
        recommended = service.model_named(body.model).ready.default_sampling
        builder = ResponseBuilder(new_response(body, response_id, reply.model, keep, recommended), search)

        def on_end(events: bytes = b"") -> None:
            _end(store, read, builder.response, keep, events)

        if body.background:
            source, held = TranslatedEvents(reply, builder, NAMES), context_of(request).held.pop_all()
            events = EventLog() if body.stream else None
            running = RunningResponse(
                read.owner, read.items, num_bytes, builder, source, held, on_end, events
            )
            background.start(running)
            if events is None:
                return JsonReply(builder.response)
            return EventStream(FollowedEvents(events, 0, receive), reply.response_id)
        if body.stream:
            return EventStream(TranslatedEvents(reply, builder, NAMES, on_end), reply.response_id)
        await build_whole(reply, builder, NAMES)
        on_end()
        return JsonReply(builder.response)

    @router.post("/v1/responses/input_tokens", responses=answers(InputTokens))
    async def count_input_tokens(body: ResponseInput, request: Request) -> Response:
        """How many tokens a response's prompt would have."""
        read = read_conversation(store, request, body, background)
        num_tokens = await num_prompt_tokens(service, prompt_fields(body, read.items), NAMES)
        count: InputTokens = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return JsonReply(count)

    _add_stored_routes(router, store, background)
    return router


def _add_stored_routes(router: APIRouter, store: ObjectStore, background: BackgroundResponses) -> None:
    @router.get("/v1/responses/{response_id}", responses=answers(ResponseObject, ResponseEvent))
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """A response that is kept or runs; the events of one in the background after `starting_after`."""
        owner, query = context_of(request).key, request.query_params
        running = background.get(owner, response_id)
        if query.get("stream", "false").lower() in ("false", "0"):
            response = (
                running.builder.response if running else store.get(RESPONSE, owner, response_id).shown()
            )
            return JsonReply(response)
        events = running.events if running else ended_log(store.get(RESPONSE, owner, response_id).events)
        if events is None:
            raise InvalidRequest(
                "only a response made with background: true and stream: true can be streamed again: leave stream out",
                "stream",
            )
        number = _number_after(query.get("starting_after"))
        return EventStream(FollowedEvents(events, number, request.receive), response_id)

    @router.post("/v1/responses/{response_id}/cancel", responses=answers(ResponseObject))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Ends a response in the background; one that has ended already is returned as it is."""
        owner = context_of(request).key
        await background.cancel(owner, response_id)
        response = store.get(RESPONSE, owner, response_id).shown()
        if not response["background"]:
            raise InvalidRequest("only a response made with background: true can be cancelled", "response_id")
        return JsonReply(response)

    @router.delete("/v1/responses/{response_id}", responses=answers(Deleted))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Deletes a response. Responses that continued it keep their own copy of the conversation."""
        owner = context_of(request).key
        await background.cancel(owner, response_id)
        store.delete(RESPONSE, owner, response_id)
        gone: Deleted = {"id": response_id, "object": "response", "deleted": True}
        return JsonReply(gone)

    @router.get("/v1/responses/{response_id}/input_items", responses=answers(ItemList))
    async def list_input_items(response_id: str, request: Request) -> Response:
        """A response's input and the conversation before it, newest first."""
        owner = context_of(request).key
        running = background.get(owner, response_id)
        items = running.items if running else store.get(RESPONSE, owner, response_id).listed_items()
        return JsonReply(page(items, request.query_params))


def _number_after(given: str | None) -> int:
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise InvalidRequest(
            f"starting_after={given[:40]!r} is no number of an event: give the last one you have",
            "starting_after",
        )
    return int(given) + 1


def _check_background(keep: bool, body: ResponseRequest) -> None:
    if body.store is False:
        raise InvalidRequest("background needs a stored response: leave store out", "background")
    if not keep:
        raise not_supported("background", "background needs stored responses: raise --max-stored-responses")


# ---------------------------------------------------------------------- conversations


@dataclass(frozen=True, slots=True)
class ReadConversation:
    owner: str | None
    conversation_id: str | None  # the stored one that it continues
    before: list[Item]
    new: list[Item]

    @property
    def items(self) -> list[Item]:
        return self.before + self.new


def read_conversation(
    store: ObjectStore,
    request: Request,
    body: ConversationInput,
    background: BackgroundResponses | None = None,
) -> ReadConversation:
    """The conversation up to the previous response and its output, or the stored one; and the new input."""
    owner = context_of(request).key
    refuse_unsupported(body)
    new = read_items(body.input, ItemFinder(store, owner))
    named, previous = conversation_id(body), body.previous_response_id
    before: list[Item] = []
    if named is not None:
        stored = store.get(CONVERSATION, owner, named, "conversation")
        if len(stored.items) > MAX_CONVERSATION_BYTES:
            raise InvalidRequest(
                f"the conversation has {len(stored.items)} bytes, of at most {MAX_CONVERSATION_BYTES}: begin another "
                "one",
                "conversation",
            )
        before = stored.listed_items()
    elif previous is not None:
        if background is not None and background.get(owner, previous) is not None:
            raise InvalidRequest(
                f"the response {previous!r} still runs: wait until it has ended", "previous_response_id"
            )
        before = store.get(RESPONSE, owner, previous, "previous_response_id").conversation()
    return ReadConversation(owner, named, before, new)


def _end(
    store: ObjectStore, read: ReadConversation, response: ResponseObject, keep: bool, events: bytes
) -> None:
    """Keeps a response, without its events if they make it too large, and adds it to its conversation."""
    if keep and not store.put(RESPONSE, read.owner, response, read.items, events=events) and events:
        store.put(RESPONSE, read.owner, response, read.items)
    if read.conversation_id is not None and response["status"] in ("completed", "incomplete"):
        with suppress(ApiError):  # the conversation may be gone by now
            add_items(store, read.owner, read.conversation_id, [*read.new, *response["output"]])


async def _within(service: Service, body: ResponseRequest, items: list[Item]) -> list[Item]:
    """The items that fit the context, if the oldest may be left out for that."""
    if body.truncation != "auto":
        return items
    service.check_room()  # counting is work
    limit = service.model_named(body.model).ready.max_model_len

    async def count(some: list[Item]) -> int:
        return await num_prompt_tokens(service, prompt_fields(body, some), NAMES)

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


# ---------------------------------------------------------------------- compaction


def _add_compact(router: APIRouter, service: Service) -> None:
    @router.post("/v1/responses/compact", responses=answers(CompactedResponse))
    async def compact_response(body: ConversationInput, request: Request) -> Response:
        """A shorter conversation to go on with: send its output as input. The summary is written by the model."""
        items = read_conversation(service.store, request, body).items
        if not items:
            raise InvalidRequest("input is empty: send a text or at least one item", "input")
        service.check_room()
        limit = service.model_named(body.model).ready.max_model_len
        num_tokens = max(1, min(MAX_SUMMARY_TOKENS, limit // 4))

        async def count(some: list[Item]) -> int:
            return await num_prompt_tokens(service, _summary_fields(body, some), NAMES)

        shown = await drop_oldest_turns(items, limit - num_tokens, count)
        fields = _summary_fields(body, shown) | {"max_completion_tokens": num_tokens, "temperature": 0.0}
        whole = await (await translated_chat(service, request, fields, NAMES)).whole()
        message = whole["choices"][0]["message"]
        summary = message["content"] or message.get("reasoning_content", "")
        compacted: CompactedResponse = {
            "id": new_id("resp"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [
                *(item for item in items if item.get("role") == "user"),
                {"id": new_id("cmp"), "type": "compaction", "encrypted_content": write_summary(summary)},
            ],
            "usage": response_usage(whole["usage"]),
        }
        return JsonReply(compacted)


def _summary_fields(body: ConversationInput, items: list[Item]) -> dict[str, object]:
    """The fields of the chat that asks for the summary, as part of the user's last turn if that comes last."""
    messages = chat_messages(items, body.instructions)
    if messages[-1]["role"] == "user":
        said = messages[-1]["content"]
        parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
        messages[-1] = {"role": "user", "content": [*parts, {"type": "text", "text": f"\n\n{_REQUEST}"}]}
    else:
        messages.append({"role": "user", "content": _REQUEST})
    return {"model": body.model, "messages": messages}
