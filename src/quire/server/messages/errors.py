"""Errors in Anthropic's shape, on the paths that speak its API."""

from quire.server.errors import ApiError
from quire.server.protocol.messages import MessageErrorBody

PATH = "/v1/messages"
REQUEST_ID = "request-id"  # the header in which Anthropic's clients look for it
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_body(error: ApiError, request_id: str) -> MessageErrorBody:
    """There is no `param` in this shape: the message names the field."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
