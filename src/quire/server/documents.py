"""What the OpenAPI document says about answers and errors."""

from typing import Any

from fastapi import FastAPI

from quire.server.protocol.base import ErrorBody

_SAID = {
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
    status: {"model": ErrorBody, "description": said} for status, said in _SAID.items()
}


def answers(whole: Any, chunk: Any | None = None) -> dict[int | str, dict[str, Any]]:
    """200 with `whole`, or a stream of `chunk`s."""
    described: dict[str, Any] = {"model": whole, "description": "The answer."}
    if chunk is not None:
        described["description"] = "The answer; with `stream`, events that each hold a chunk, then `[DONE]`."
        described["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: described}


def without_422(app: FastAPI) -> dict[str, Any]:
    """FastAPI promises 422 for bad bodies; here they are 400, in OpenAI's shape."""
    document = FastAPI.openapi(app)
    for path in document["paths"].values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
