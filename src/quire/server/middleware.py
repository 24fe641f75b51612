"""RequestMiddleware: what every request passes before an endpoint: id, key, limits, log line.

Plain ASGI: Starlette's BaseHTTPMiddleware puts a queue between an endpoint and its client, which costs time per
token and hides disconnects.
"""

import re
import time
import uuid
from collections.abc import Awaitable
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observe.logs import get_logger
from quire.server.access import Keys, Rates, RequestContext, offered_key, path_of, set_context
from quire.server.errors import ApiError, as_api_error
from quire.server.metrics import Metrics
from quire.server.reply import error_reply
from quire.server.traces import OtlpTraces

log = get_logger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Probes, scrapers and documents ask without a key; everything else needs one where keys are set.
OPEN_PATHS = frozenset(
    {"/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect"}
)
ADMIN_PATHS = frozenset(
    {"/reset_prefix_cache", "/check_integrity", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)


class RequestMiddleware:
    """Assigns request ids, authenticates, enforces limits, logs, and turns unhandled exceptions into 500s."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        admin: Keys,
        rates: Rates,
        metrics: Metrics,
        traces: OtlpTraces | None,
        max_body_bytes: int,
        log_requests: bool,
        keep_alive: float,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin = admin
        self._rates = rates
        self._metrics = metrics
        self._traces = traces
        self._max_body_bytes = max_body_bytes
        self._log_requests = log_requests
        self._keep_alive = keep_alive
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path  # routing takes it off again where a proxy left it on
        context = RequestContext(_request_id(scope), keep_alive=self._keep_alive)
        set_context(scope, context)
        response = _Response(send, context)
        try:
            await self._authorized(scope, context, receive, response)
        except ApiError as error:
            await response.fail(error, scope, receive)
        except Exception as fault:
            log.exception(
                "%s %s failed", scope["method"], _shown_path(scope), extra={"request_id": context.request_id}
            )
            await response.fail(as_api_error(fault), scope, receive)
        finally:
            self._note(scope, context, response.status)

    async def _authorized(
        self, scope: Scope, context: RequestContext, receive: Receive, response: "_Response"
    ) -> None:
        path = path_of(scope)
        context.key = self._identified(path, scope)
        receive = _limited(scope, receive, self._max_body_bytes)
        with self._keys.hold(context.key if path not in OPEN_PATHS else None):
            if path not in ADMIN_PATHS:
                context.allowance = self._rates.of(context.key)
            if scope["method"] == "POST":  # reads are free
                self._take_request(context)
            await self._app(scope, receive, response.send)

    def _take_request(self, context: RequestContext) -> None:
        try:
            context.allowance.take_request()
        except ApiError:
            self._metrics.refused("rate_limit")
            raise

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
                f"this needs {wanted}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return name

    def _note(self, scope: Scope, context: RequestContext, status: int) -> None:
        # never the raw path, which would let clients create metric series
        route = getattr(scope.get("route"), "path", None) or "other"
        self._metrics.http_request(route, status)
        if path_of(scope) in OPEN_PATHS:
            return
        if self._traces is not None:
            self._traces.note(context, scope["method"], route, status, scope["headers"])
        if self._log_requests:
            seconds = time.monotonic() - context.arrival
            facts = {"request_id": context.request_id, "status": status, "seconds": round(seconds, 4)}
            if context.key is not None:
                facts["key"] = context.key
            facts.update(context.facts)
            shown = " ".join(f"{name}={value}" for name, value in facts.items())
            method, path = scope["method"], _shown_path(scope)
            log.info("%s %s %s", method, path, shown, extra={"method": method, "path": path, **facts})


class _Response:
    """Adds the request's id and its key's rate limits to the response's headers; remembers the status."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self.status = 499  # nothing was sent: the client left

    def send(self, message: Message) -> Awaitable[None]:
        """No coroutine of its own: it runs for every token of a stream."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._context.request_id
            headers.update(self._context.allowance.headers())
        return self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """A response that has begun cannot be taken back: it ends where it is."""
        if self.status == 499:
            await error_reply(scope, error)(scope, receive, self.send)


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


def _shown_path(scope: Scope) -> str:
    """Fit for a line of the log: a path may hold line breaks and worse."""
    return quote(path_of(scope))
