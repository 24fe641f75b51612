"""Caller: who asks, under which id, and whether they are still there."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope


@dataclass(slots=True)
class Caller:
    """Made by the middleware for each request; endpoints add what the log should say."""

    request_id: str
    key: str | None = None  # the key's name, not the key
    arrival: float = field(default_factory=time.monotonic)
    facts: dict[str, object] = field(default_factory=dict)  # for the log line: token counts, finish reasons


def caller_of(request: Request) -> Caller:
    return request.scope["quire.caller"]


def set_caller(scope: Scope, caller: Caller) -> None:
    scope["quire.caller"] = caller


async def until_gone(receive: Receive) -> None:
    """Returns when the connection is closed. Only for requests whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
