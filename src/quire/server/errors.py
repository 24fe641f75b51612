"""Errors as HTTP responses: a status, and the body of the API that the path belongs to, OpenAI's or Anthropic's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from quire.core.errors import (
    ContextExceeded,
    EngineDead,
    InvalidRequest,
    NotFound,
    QueueFull,
    QuireError,
    StorageFull,
    renamed_field,
)
from quire.server.protocol.base import ErrorBody
from quire.server.protocol.messages import MessageErrorBody

T = TypeVar("T", bound=pydantic.BaseModel)
MAX_MESSAGE = 2000  # characters; a message may quote what the request said


class ApiError(Exception):
    """Ends a request with this status and body. A long message is cut."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: str | None = None,
    ) -> None:
        """`anthropic`: the message in Anthropic's shape, where clients look for its words."""
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…")
        self.anthropic = anthropic
        self.status = status
        self.kind = kind or _kind(status)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same error with its field called what `names` says."""
        param = None if self.param is None else renamed_field(self.param, names)
        return ApiError(
            self.status,
            str(self),
            kind=self.kind,
            param=param,
            code=self.code,
            headers=self.headers,
            anthropic=self.anthropic,
        )

    def body(self) -> ErrorBody:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client closed the connection: no response can reach it."""


class Unavailable(ApiError):
    """Not now: the engine is starting, restarting or shutting down."""

    def __init__(self, message: str, code: str, retry_seconds: int = 5) -> None:
        super().__init__(503, message, code=code, headers={"Retry-After": str(retry_seconds)})


class TimedOut(ApiError):
    def __init__(self, seconds: float) -> None:
        message = (
            f"the request took longer than {seconds:g} s: ask for fewer tokens, or raise --request-timeout"
        )
        super().__init__(504, message, code="request_timeout")


def context_exceeded(num_prompt: int, max_tokens: int | None, limit: int, what: str) -> ApiError:
    """In the words of OpenAI and of Anthropic, by which clients know that they must shorten the conversation.

    The message has the code too: LangChain looks there, and OpenAI's client 3 shows the message only.
    """
    num_answer = max_tokens or 1
    total = num_prompt + num_answer
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
        f"({num_prompt} in the {what}, {num_answer} in the completion). Please reduce the length of the {what} or "
        "completion. (context_length_exceeded: truncate_prompt_tokens cuts the prompt; a server with a larger "
        "--max-model-len takes more.)",
        param="prompt",
        code="context_length_exceeded",
        anthropic=f"prompt is too long: {num_prompt} tokens > {limit - 1} maximum",
    )


def not_supported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported")


def as_api_error(error: Exception, retry_seconds: int = 1) -> ApiError:
    """Any error as the client may see it; faults of the server show no details."""
    match error:
        case ApiError():
            return error
        case ContextExceeded():
            known, param = error.values, error.param or "prompt"
            if "num_tokens" not in known:
                return ApiError(400, str(error), param=param, code="context_length_exceeded")
            exceeded = context_exceeded(known["num_tokens"], None, known["max_model_len"], param)
            return exceeded.renamed({"prompt": param})
        case NotFound():
            return ApiError(404, str(error), param=error.param, code="not_found")
        case StorageFull():
            return ApiError(413, str(error), code="storage_full")
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param)
        case QueueFull():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(retry_seconds)},
            )
        case EngineDead():
            return ApiError(500, str(error), code="engine_dead")
        case QuireError():
            return ApiError(500, str(error))
    return ApiError(500, "an unforeseen fault of the server: its log says more under this request's id")


def from_validation(problems: Sequence[Mapping[str, Any]], body: Any) -> InvalidRequest:
    """pydantic's findings as one error: the first wrong field, with all findings about it."""
    first = problems[0]
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return InvalidRequest(f"the body is no valid JSON ({detail}, at character {first['loc'][-1]})")
    param = _path(first, body)
    if not param:
        return InvalidRequest("the body must be a JSON object, sent with Content-Type: application/json")
    messages: dict[str, None] = {}
    for problem in problems:
        if _path(problem, body) == param:
            messages[_lowered(str(problem["msg"]))] = None
    return InvalidRequest("{param}: {messages}", param, messages=", or ".join(messages))


def validated(model: type[T], fields: Mapping[str, Any]) -> T:
    """The fields as a body of this type; raises the error of the first that is wrong."""
    try:
        return model.model_validate(fields)
    except pydantic.ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise from_validation(problems, fields) from None


def _path(problem: Mapping[str, Any], body: Any) -> str:
    """`messages[0].role`. Stops where pydantic appends the names of a union's members."""
    path = ""
    is_missing = problem["type"] == "missing"
    for part in problem["loc"][1:]:
        if isinstance(part, int) and isinstance(body, list):
            path += f"[{part}]"
            body = body[part] if part < len(body) else None
        elif isinstance(part, str) and isinstance(body, dict) and (part in body or is_missing):
            path += f".{part}" if path else part
            body = body.get(part)
        else:
            break
    return path


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


# ---------------------------------------------------------------------- Anthropic's shape

ANTHROPIC_PATH = "/v1/messages"
# Clients that find this code in `details` send all messages instead.
THREAD_UNSUPPORTED = "thread_unsupported_request"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> bool:
    """Whether the path belongs to Anthropic's API; that of models does for clients with Anthropic's header."""
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return True
    return path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in headers)


def anthropic_body(error: ApiError, request_id: str) -> MessageErrorBody:
    """There is no `param` in this shape: the message names the field."""
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.anthropic or str(error)
    if error.anthropic is None and error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    body: MessageErrorBody = {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }
    if error.code == THREAD_UNSUPPORTED:
        body["error"]["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return body
