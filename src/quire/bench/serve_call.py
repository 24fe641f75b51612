"""One request of `bench serve`: sent, timed token by token, and told how it ended."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.bench.http_client import ConnectionLost, HttpClient, Response


@dataclass(frozen=True, slots=True)
class Call:
    """A streamed request to one endpoint."""

    path: str
    body: Mapping[str, Any]

    def encoded(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass(slots=True)
class Outcome:
    """What came back; all times in seconds on this process's monotonic clock. Without `error` it is complete."""

    sent: float = 0.0
    first_token: float | None = None
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces of text that came one after the other
    texts: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None  # its kind: faults are counted by it

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def seconds(self) -> float:
        """From sending to the last piece."""
        return self.ended - self.sent

    @property
    def to_first(self) -> float:
        """TTFT."""
        return (self.first_token or self.ended) - self.sent

    @property
    def per_token(self) -> float | None:
        """TPOT, (end to end − first token) / (outputs − 1); one token has none."""
        if self.num_output_tokens < 2:
            return None
        return (self.seconds - self.to_first) / (self.num_output_tokens - 1)


def completion_call(
    path: str, model: str | None, prompt: str, max_tokens: int, extra: Mapping[str, Any]
) -> Call:
    """For the chat endpoint the prompt is a user's message."""
    asked: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
    }
    if path.endswith("/chat/completions"):
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    if model is not None:
        asked["model"] = model
    return Call(path, {**asked, **extra})


async def make_call(client: HttpClient, call: Call, timeout: float | None = None) -> Outcome:
    """Never raises for what a server or a network does: the outcome's `error` says it."""
    outcome = Outcome(sent=time.perf_counter())
    try:
        async with asyncio.timeout(timeout), client.send("POST", call.path, call.encoded()) as response:
            outcome.status = response.status
            if response.status == 200:
                await _take_stream(response, outcome)
            else:
                outcome.error = _refusal(response.status, await response.read())
    except ConnectionLost as fault:
        outcome.error = str(fault)
    except TimeoutError:
        outcome.error = f"no end within {timeout:g} s"
    outcome.ended = outcome.ended if outcome.error is None else time.perf_counter()
    return outcome


async def _take_stream(response: Response, outcome: Outcome) -> None:
    last = 0.0
    done = False
    num_pieces = 0
    async for data in response.events():
        if data == b"[DONE]":
            done = True
            continue
        event = _parsed(data)
        if "error" in event:
            outcome.error = outcome.error or f"error event: {_error_name(event)}"
            continue
        if event.get("usage"):
            outcome.num_prompt_tokens = event["usage"].get("prompt_tokens", 0)
            outcome.num_output_tokens = event["usage"].get("completion_tokens", 0)
        for choice in event.get("choices", ()):
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            if text := _text(choice):
                now = time.perf_counter()
                outcome.texts.append(text)
                num_pieces += 1
                if outcome.first_token is None:
                    outcome.first_token = now
                else:
                    outcome.gaps.append(now - last)
                last = now
    outcome.ended = last or time.perf_counter()
    outcome.num_output_tokens = outcome.num_output_tokens or num_pieces  # a server without usage
    if outcome.error is None and not done:
        outcome.error = "the stream ended without [DONE]"
    elif outcome.error is None and outcome.finish_reason is None:
        outcome.error = "the stream ended without a finish_reason"


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": "an event is no JSON object"}


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status} {_error_name(json.loads(body))}".rstrip()
    except ValueError:
        return f"HTTP {status}"


def _error_name(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return str(error or "")[:80]
    return str(error.get("code") or error.get("type") or error.get("message") or "")[:80]
