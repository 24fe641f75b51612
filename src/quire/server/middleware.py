"""What happens to every request before an endpoint sees it: an id, a key, a size limit, a line in the log.

Plain ASGI: Starlette's BaseHTTPMiddleware puts a queue between an endpoint and its client, which costs time per
token and hides disconnects.
"""

import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observe.logs import get_logger
from quire.server.caller import Caller, set_caller
from quire.server.errors import ApiError, as_api_error
from quire.server.keys import Keys, offered_key
from quire.server.metrics import Metrics
from quire.server.reply import error_reply

log = get_logger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Probes, scrapers and documents ask without a key; everything else needs one where keys are set.
OPEN_PATHS = frozenset(
    {"/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect"}
)
ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/check_integrity"})


class Doorman:
    """The outermost layer of ours: ids, keys, limits; the last that sees a fault; the log's writer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        admin: Keys,
        metrics: Metrics,
        max_body_bytes: int,
        log_requests: bool,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin = admin
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._log_requests = log_requests
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path  # routing takes it off again where a proxy left it on
        caller = Caller(_request_id(scope))
        set_caller(scope, caller)
        response = _Response(send, caller.request_id)
        try:
            await self._let_in(scope, caller, receive, response)
        except ApiError as error:
            await response.fail(error, scope, receive)
        except Exception as fault:
            log.exception(
                "%s %s failed", scope["method"], scope["path"], extra={"request_id": caller.request_id}
            )
            await response.fail(as_api_error(fault), scope, receive)
        finally:
            self._note(scope, caller, response.status)

    async def _let_in(self, scope: Scope, caller: Caller, receive: Receive, response: "_Response") -> None:
        path = _path(scope)
        caller.key = self._identified(path, scope)
        receive = _limited(scope, receive, self._max_body_bytes)
        with self._keys.hold(caller.key if path not in OPEN_PATHS else None):
            await self._app(scope, receive, response.send)

    def _identified(self, path: str, scope: Scope) -> str | None:
        if path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        if path in ADMIN_PATHS and not self._admin:
            raise ApiError(403, "operators' calls are off: start the server with --admin-key to allow them")
        keys = self._admin if path in ADMIN_PATHS else self._keys
        if not keys:
            return None
        name = keys.identify(offered_key(scope["headers"]))
        if name is None:
            wanted = "the admin key" if path in ADMIN_PATHS else "an API key"
            raise ApiError(
                401,
                f"this needs {wanted}: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return name

    def _note(self, scope: Scope, caller: Caller, status: int) -> None:
        route = (
            getattr(scope.get("route"), "path", None) or "other"
        )  # never the raw path: anyone can invent those
        self._metrics.http_request(route, status)
        if self._log_requests and _path(scope) not in OPEN_PATHS:
            seconds = time.monotonic() - caller.arrival
            facts = {"request_id": caller.request_id, "status": status, "seconds": round(seconds, 4)}
            if caller.key is not None:
                facts["key"] = caller.key
            facts.update(caller.facts)
            shown = " ".join(f"{name}={value}" for name, value in facts.items())
            log.info("%s %s %s", scope["method"], _path(scope), shown, extra=facts)


class _Response:
    """Watches what goes out, and puts the request's id on it."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 499  # nothing was sent: the client left

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._request_id
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """A response that has begun cannot be taken back: it ends where it is."""
        if self.status == 499:
            await error_reply(error)(scope, receive, self.send)


def _limited(scope: Scope, receive: Receive, limit: int) -> Receive:
    """Raises 413 as soon as the body is known to be too large, however it is sent."""
    refusal = ApiError(
        413,
        f"the body is larger than {limit} bytes: send less, or raise --max-body-bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise refusal
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise refusal
        return message

    return counted


def _request_id(scope: Scope) -> str:
    """The caller's own, if it is fit for a header and a log line."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return f"req-{uuid.uuid4().hex}"


def _path(scope: Scope) -> str:
    """The path below --root-path, whether or not a proxy cut that off."""
    root, path = scope.get("root_path", ""), scope["path"]
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
