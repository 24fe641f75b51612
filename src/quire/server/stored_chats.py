"""Stored chat completions: answers of requests with `store: true`, to list, retrieve, update and delete."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.access import add_warning, context_of
from quire.server.protocol.base import Deleted
from quire.server.protocol.completions import (
    ChatCompletion,
    ChatCompletionRequest,
    StoredChat,
    StoredChatList,
    StoredChatUpdate,
    StoredMessageList,
)
from quire.server.reply import EventStream, JsonReply, answers, event
from quire.server.service import Service
from quire.server.stored import CHAT, check_encodable, page

if TYPE_CHECKING:  # chat.py imports this module
    from quire.server.chat import ChatReply

Answering = Callable[[Service, Request, ChatCompletionRequest], Awaitable["ChatReply"]]


async def create_stored_chat(
    service: Service, request: Request, body: ChatCompletionRequest, answer: Answering
) -> Response:
    """Answers a chat and keeps the answer when it has ended."""
    check_encodable(body.messages, body.metadata)
    if not service.store.max_objects:
        add_warning(request, "store has no effect: the server keeps nothing (--max-stored-responses 0)")
    owner = context_of(request).key
    reply = await answer(service, request, body)

    def keep(completion: ChatCompletion) -> None:
        fields: dict[str, Any] = dict(completion)
        head = {"model": fields.pop("model"), "metadata": body.metadata or {}}
        service.store.put(CHAT, owner, fields, body.messages, head=head)

    if body.stream:
        return EventStream(_StoredStream(reply, keep), reply.response_id)
    whole = await reply.whole()
    keep(whole)
    return JsonReply(whole)


class _StoredStream:
    """An EventSource: a chat's chunks. Keeps the whole answer, whose calls have the ids that were streamed."""

    def __init__(self, reply: "ChatReply", keep: Callable[[ChatCompletion], None]) -> None:
        self.generation = reply.generation
        self.fail = reply.fail
        self._reply = reply
        self._keep = keep
        self._call_ids: dict[tuple[int, int], str] = {}  # by choice and call

    def take(self) -> bytes:
        chunks = self._reply.take_chunks()
        for chunk in chunks:
            for choice in chunk["choices"]:
                for call in choice["delta"].get("tool_calls", ()):
                    if "id" in call:
                        self._call_ids[choice["index"], call["index"]] = call["id"]
        return b"".join([event(chunk) for chunk in chunks])

    def end(self) -> bytes:
        whole = self._reply.completion()
        for choice in whole["choices"]:
            for number, call in enumerate(choice["message"].get("tool_calls", ())):
                call["id"] = self._call_ids.get((choice["index"], number), call["id"])
        self._keep(whole)
        return self._reply.end()


def stored_chats_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["chat"])
    store = service.store

    @router.get("/v1/chat/completions", responses=answers(StoredChatList))
    async def list_chat_completions(request: Request) -> Response:
        """Stored chat completions, oldest first, filtered by `model` and `metadata[KEY]=VALUE`."""
        query = request.query_params
        wanted = {
            name[9:-1]: value
            for name, value in query.multi_items()
            if name.startswith("metadata[") and name.endswith("]")
        }
        entries = [
            {"id": stored.object_id, "stored": stored}
            for stored in store.all_of(CHAT, context_of(request).key)
            if query.get("model") in (None, stored.head["model"])
            and wanted.items() <= stored.head["metadata"].items()
        ]
        listed = page(entries, query, "asc", "chat completion")
        listed["data"] = [entry["stored"].shown() for entry in listed["data"]]
        return JsonReply(listed)

    @router.get("/v1/chat/completions/{completion_id}", responses=answers(StoredChat))
    async def retrieve_chat_completion(completion_id: str, request: Request) -> Response:
        return JsonReply(store.get(CHAT, context_of(request).key, completion_id).shown())

    @router.post("/v1/chat/completions/{completion_id}", responses=answers(StoredChat))
    async def update_chat_completion(
        completion_id: str, body: StoredChatUpdate, request: Request
    ) -> Response:
        """Replaces the metadata of a stored chat completion."""
        check_encodable(body.metadata)
        updated = store.update(
            CHAT, context_of(request).key, completion_id, {"metadata": body.metadata or {}}
        )
        return JsonReply(updated.shown())

    @router.delete("/v1/chat/completions/{completion_id}", responses=answers(Deleted))
    async def delete_chat_completion(completion_id: str, request: Request) -> Response:
        store.delete(CHAT, context_of(request).key, completion_id)
        gone: Deleted = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
        return JsonReply(gone)

    @router.get("/v1/chat/completions/{completion_id}/messages", responses=answers(StoredMessageList))
    async def list_chat_messages(completion_id: str, request: Request) -> Response:
        """The messages of the request that a stored chat completion answers, oldest first."""
        messages = store.get(CHAT, context_of(request).key, completion_id).listed_items()
        shown = [_message(message, f"{completion_id}-{index}") for index, message in enumerate(messages)]
        return JsonReply(page(shown, request.query_params, "asc", "message"))

    return router


def _message(message: dict[str, Any], message_id: str) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    return {**message, "id": message_id, "content": None if parts else content, "content_parts": parts}
