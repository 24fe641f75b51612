"""POST /v1/responses/compact: a long conversation as the user's messages and a summary of the rest."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.protocol.responses import CompactedResponse, ConversationInput, Item
from quire.server.reply import JsonReply, answers
from quire.server.responses.builder import response_usage
from quire.server.responses.convert_request import NAMES, chat_messages, new_id, write_summary
from quire.server.responses.endpoints import drop_oldest_turns, read_conversation
from quire.server.service import Service
from quire.server.translation import translated_chat, translated_prompt

MAX_SUMMARY_TOKENS = 1024
_REQUEST = (
    "Summarise this conversation for the assistant that will continue it. Keep facts, decisions, names, numbers, "
    "results of tools and open questions. Write only the summary."
)


def compact_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["responses"])

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
            return len((await translated_prompt(service, _fields(body, some), NAMES)).token_ids)

        shown = await drop_oldest_turns(items, limit - num_tokens, count)
        fields = _fields(body, shown) | {"max_completion_tokens": num_tokens, "temperature": 0.0}
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

    return router


def _fields(body: ConversationInput, items: list[Item]) -> dict[str, object]:
    """The fields of the chat that asks for the summary, as part of the user's last turn if that comes last."""
    messages = chat_messages(items, body.instructions)
    if messages[-1]["role"] == "user":
        said = messages[-1]["content"]
        parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
        messages[-1] = {"role": "user", "content": [*parts, {"type": "text", "text": f"\n\n{_REQUEST}"}]}
    else:
        messages.append({"role": "user", "content": _REQUEST})
    return {"model": body.model, "messages": messages}
