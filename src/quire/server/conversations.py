"""/v1/conversations: items that responses continue and add to."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.access import context_of
from quire.server.errors import ApiError, not_supported
from quire.server.protocol.base import Deleted
from quire.server.protocol.responses import (
    Conversation,
    ConversationUpdate,
    Item,
    ItemList,
    NewConversation,
    NewItems,
)
from quire.server.reply import JsonReply, answers
from quire.server.responses.convert_request import new_id, read_items
from quire.server.service import Service
from quire.server.stored import CONVERSATION, ObjectStore, StoredObject, check_encodable, list_page, page

MAX_CONVERSATION_BYTES = 4 << 20
MAX_REFERRED_BYTES = 32 << 20


def conversations_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["conversations"])
    store = service.store

    @router.post("/v1/conversations", responses=answers(Conversation))
    async def create_conversation(request: Request, body: NewConversation | None = None) -> Response:
        """Begins a conversation, with items or without."""
        owner, body = context_of(request).key, body or NewConversation(items=None)
        items = read_items(body.items or (), ItemFinder(store, owner))
        check_encodable(body.metadata)
        _check_size(check_encodable(items))
        made = {"id": new_id("conv"), "object": "conversation", "created_at": int(time.time())}
        head = {"metadata": body.metadata or {}}
        if not store.put(CONVERSATION, owner, made, items, head=head):
            raise _not_kept()
        return JsonReply(made | head)

    @router.get("/v1/conversations/{conversation_id}", responses=answers(Conversation))
    async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
        return JsonReply(store.get(CONVERSATION, context_of(request).key, conversation_id).shown())

    @router.post("/v1/conversations/{conversation_id}", responses=answers(Conversation))
    async def update_conversation(
        conversation_id: str, body: ConversationUpdate, request: Request
    ) -> Response:
        """Replaces the metadata of a conversation."""
        check_encodable(body.metadata)
        head = {"metadata": body.metadata or {}}
        return JsonReply(store.update(CONVERSATION, context_of(request).key, conversation_id, head).shown())

    @router.delete("/v1/conversations/{conversation_id}", responses=answers(Deleted))
    async def delete_conversation(conversation_id: str, request: Request) -> Response:
        """Deletes a conversation with its items. Responses that belonged to it stay."""
        store.delete(CONVERSATION, context_of(request).key, conversation_id)
        gone: Deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return JsonReply(gone)

    _add_item_routes(router, store)
    return router


def _add_item_routes(router: APIRouter, store: ObjectStore) -> None:
    path = "/v1/conversations/{conversation_id}/items"

    def conversation(request: Request, conversation_id: str) -> StoredObject:
        return store.get(CONVERSATION, context_of(request).key, conversation_id)

    @router.post(path, responses=answers(ItemList))
    async def create_items(conversation_id: str, body: NewItems, request: Request) -> Response:
        """Adds items to the end of a conversation."""
        stored = conversation(request, conversation_id)
        items = read_items(body.items, ItemFinder(store, stored.owner))
        _check_size(len(stored.items) + check_encodable(items))
        if not add_items(store, stored.owner, conversation_id, items):
            raise _not_kept()
        return JsonReply(list_page(items, has_more=False))

    @router.get(path, responses=answers(ItemList))
    async def list_items(conversation_id: str, request: Request) -> Response:
        """The items of a conversation, newest first."""
        return JsonReply(page(conversation(request, conversation_id).listed_items(), request.query_params))

    @router.get(f"{path}/{{item_id}}", responses=answers(Item))
    async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
        items = conversation(request, conversation_id).listed_items()
        return JsonReply(items[_index(items, item_id)])

    @router.delete(f"{path}/{{item_id}}", responses=answers(Conversation))
    async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
        """Deletes an item; returns the conversation."""
        stored = conversation(request, conversation_id)
        items = stored.listed_items()
        del items[_index(items, item_id)]
        store.put_items(stored, items)
        return JsonReply(stored.shown())


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_CONVERSATION_BYTES:
        raise InvalidRequest(
            f"the conversation would be larger than {MAX_CONVERSATION_BYTES} bytes: send less, or begin another one",
            "items",
        )


def _index(items: Sequence[Item], item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise ApiError(404, f"there is no item {item_id[:80]!r} in this conversation", code="item_not_found")


def _not_kept() -> ApiError:
    return not_supported(
        "items",
        "the server cannot keep this conversation: it is larger than --max-stored-responses-bytes, or "
        "--max-stored-responses is 0",
    )


def add_items(store: ObjectStore, owner: str | None, conversation_id: str, items: Sequence[Item]) -> bool:
    """Adds to the end what the conversation does not have yet; False if the store is too small for it.

    Raises 404 if the conversation is gone.
    """
    stored = store.get(CONVERSATION, owner, conversation_id)
    before = stored.listed_items()
    known = {item["id"] for item in before}
    return store.put_items(stored, [*before, *(item for item in items if item["id"] not in known)])


class ItemFinder:
    """Finds items by their ids in what an owner has stored."""

    def __init__(self, store: ObjectStore, owner: str | None) -> None:
        self._store = store
        self._owner = owner
        self._known: dict[str, Item] = {}
        self._num_bytes = 0  # of objects that were read

    def __call__(self, item_id: str, path: str) -> Item:
        if item_id not in self._known:
            stored = self._store.with_item(self._owner, item_id)
            if stored is None:
                raise ApiError(
                    404,
                    f"{path} refers to the item {item_id[:80]!r}, which is not stored: send the item itself",
                    param="input",
                    code="item_not_found",
                )
            self._num_bytes += stored.num_bytes
            if self._num_bytes > MAX_REFERRED_BYTES:
                raise InvalidRequest.at(
                    path,
                    f"is in responses of more than {MAX_REFERRED_BYTES} bytes together: send the item itself",
                )
            self._known.update({item["id"]: item for item in stored.conversation()})
        return self._known[item_id]
