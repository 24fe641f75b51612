"""Replies: JSON by msgspec, and what the OpenAPI document says about answers and errors."""

import time
from typing import Any

import msgspec
from starlette.responses import Response

from quire import __version__
from quire.server.protocol.base import ErrorBody
from quire.server.protocol.completions import AnswerHead

REQUEST_ID = "request-id"  # the header in which Anthropic's clients look for it
FINGERPRINT = f"quire-{__version__}"  # the same program gives the same tokens for the same seed
_ERROR_TEXTS = {
    400: "Something in the request is wrong or not supported; `param` names it.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Too much is waiting already; Retry-After says when to come again.",
    500: "The request failed in the engine.",
    503: "Not now: the engine is starting, or the server is shutting down.",
    504: "The request took too long.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _ERROR_TEXTS.items()
}


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def answer_head(response_id: str, kind: str, model: str) -> AnswerHead:
    return {
        "id": response_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def answers(whole: Any, chunk: Any | None = None) -> dict[int | str, dict[str, Any]]:
    """200 with `whole`, or a stream of `chunk`s, for the OpenAPI document."""
    described: dict[str, Any] = {"model": whole, "description": "The answer."}
    if chunk is not None:
        described["description"] = "The answer; with `stream`, events that each hold a chunk, then `[DONE]`."
        described["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: described}
