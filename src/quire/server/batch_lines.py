"""OpenAI's batch format: a request a line in, a result a line out."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # in the file, from 1
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request; it gets a row that says why."""

    number: int
    custom_id: str | None
    message: str


def parse_line(number: int, text: str) -> BatchLine | BadLine:
    try:
        found = json.loads(text)
    except ValueError as error:
        return BadLine(number, None, f"is no valid JSON ({error})")
    if not isinstance(found, dict):
        return BadLine(number, None, f"is no JSON object but {type(found).__name__}")
    custom_id, body = found.get("custom_id"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "has no custom_id: give each line a text that is its own")
    wrong = _what_is_wrong(found.get("method", "POST"), found.get("url"), body)
    if wrong is not None:
        return BadLine(number, custom_id, wrong)
    assert isinstance(body, dict)
    return BatchLine(number, custom_id, found["url"], body)


def _what_is_wrong(method: Any, url: Any, body: Any) -> str | None:
    if method != "POST":
        return f"has the method {method!r}: write POST"
    if url not in URLS:
        return f"has the url {url!r}: choose one of {', '.join(URLS)}"
    if not isinstance(body, dict):
        return "has no body: give the request as a JSON object"
    if body.get("stream"):
        return "asks for a stream: a batch has none, leave `stream` out"
    return None


def answer_row(line: BatchLine, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Any response of the endpoint, also one that refuses: `error` is for what never reached it."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _row_id(), "custom_id": line.custom_id, "response": response, "error": None}


def error_row(line: BatchLine | BadLine, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": f"line {line.number} {message}"}
    return {"id": _row_id(), "custom_id": line.custom_id, "response": None, "error": error}


def is_finished(row: Any) -> bool:
    """Whether a row of an earlier run stands: an answer, or a refusal that would come again."""
    if not isinstance(row, dict) or not isinstance(row.get("custom_id"), str):
        return False
    response = row.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    return isinstance(status, int) and status < 500 and status != 429


def _row_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
