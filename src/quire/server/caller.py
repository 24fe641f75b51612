"""Caller: who asks, under which id, and whether they are still there."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope

from quire.server.errors import ApiError
from quire.server.rates import Allowance


@dataclass(slots=True)
class Caller:
    """Made by the middleware for each request; endpoints add what the log should say."""

    request_id: str
    key: str | None = None  # the key's name, not the key
    allowance: Allowance = field(default_factory=Allowance)  # what that key may still have this minute
    keep_alive: float = 15.0  # seconds of silence on a stream before a comment is sent; 0: never
    arrival: float = field(default_factory=time.monotonic)
    facts: dict[str, object] = field(default_factory=dict)  # for the log line: token counts, finish reasons

    def note_error(self, error: ApiError) -> None:
        """For the log and the trace: which error ended it."""
        self.facts["error"] = error.code or error.kind


def caller_of(request: Request) -> Caller:
    return request.scope["quire.caller"]


def set_caller(scope: Scope, caller: Caller) -> None:
    scope["quire.caller"] = caller


def path_of(scope: Scope) -> str:
    """The path below --root-path, whether or not a proxy cut that off."""
    root, path = scope.get("root_path", ""), scope["path"]
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def until_gone(receive: Receive) -> None:
    """Returns when the connection is closed. Only for requests whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
