"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.caller import caller_of
from quire.server.documents import ERRORS, answers
from quire.server.messages.asking import NAMES, chat_fields, prompt_fields
from quire.server.messages.draft import MessageBuilder
from quire.server.messages.errors import REQUEST_ID, anthropic_body
from quire.server.protocol.messages import (
    Message,
    MessageErrorBody,
    MessageEvent,
    MessageInput,
    MessageRequest,
    TokenCount,
)
from quire.server.reply import JsonReply, named_event, streamed
from quire.server.service import Service
from quire.server.translation import draft_events, draft_whole, translated_chat, translated_prompt

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**said, "model": MessageErrorBody} for status, said in ERRORS.items()
}


def messages_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["messages"])

    @router.post("/v1/messages", responses={**answers(Message, MessageEvent), **_ERRORS})
    async def create_message(body: MessageRequest, request: Request) -> Response:
        """Answers a conversation, whole or in events, as Anthropic's API does."""
        request_id = caller_of(request).request_id
        reply = await translated_chat(service, request, chat_fields(body), NAMES)
        message_id = f"msg_{reply.response_id.removeprefix('chatcmpl-')}"
        draft = MessageBuilder(message_id, reply.model, body.max_tokens)
        if body.stream:
            events = draft_events(reply, draft)
            response: Response = await streamed(
                events, reply.response_id, lambda error: named_event(anthropic_body(error, request_id))
            )
        else:
            await draft_whole(reply, draft)
            response = JsonReply(draft.message)
        response.headers[REQUEST_ID] = request_id
        return response

    @router.post("/v1/messages/count_tokens", responses={**answers(TokenCount), **_ERRORS})
    async def count_tokens(body: MessageInput) -> Response:
        """How many tokens a message's prompt would have."""
        prompt = await translated_prompt(service, prompt_fields(body), NAMES)
        found: TokenCount = {"input_tokens": len(prompt.token_ids)}
        return JsonReply(found)

    return router
