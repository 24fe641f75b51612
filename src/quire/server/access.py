"""Access: API keys, rate limits, the RequestContext of each request, and the middleware that every request passes."""

import hashlib
import hmac
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import ConfigError
from quire.observe.logs import get_logger
from quire.server.connection import limited
from quire.server.errors import ApiError, anthropic_body, as_api_error, speaks_anthropic
from quire.server.reply import REQUEST_ID, JsonReply

if TYPE_CHECKING:
    from quire.server.service import Service

log = get_logger(__name__)
Clock = Callable[[], float]
MAX_WARNINGS = 8  # of one response
MAX_WARNING_CHARACTERS = 400
_UNPRINTABLE = re.compile(r"[^ -~]")
_KINDS = ("requests", "tokens")
OLLAMA = "/api/"  # paths of its API, whose errors are one string
RATE_HEADERS = tuple(
    f"x-ratelimit-{part}-{kind}" for part in ("limit", "remaining", "reset") for kind in _KINDS
)


class Origins(CORSMiddleware):
    """For programs in pages of other origins (--allowed-origins)."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        exposed = ["X-Request-Id", "Retry-After", "Warning", "X-Quire-Model-Wait", *RATE_HEADERS]
        super().__init__(app, list(origins), ["*"], ["*"], expose_headers=exposed)


# ---------------------------------------------------------------------- rates


class TokenBucket:
    """Starts full and refills evenly: a minute's worth may come at once, then as fast as it refills.

    It may be overdrawn by an answer, whose length is not known before; later requests wait for the debt.
    """

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.limit = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / 60)
        self._at = now
        return self._level

    def spend(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, amount: float) -> float:
        """Until `amount` is there, if none is spent meanwhile."""
        return max(0.0, (amount - self.level) * 60 / self.limit)


class Allowance:
    """One key's two buckets; None is no limit."""

    def __init__(self, requests: TokenBucket | None = None, tokens: TokenBucket | None = None) -> None:
        self._requests = requests
        self._tokens = tokens

    def take_request(self) -> None:
        """Counts one more request, or raises 429."""
        _check("requests", self._requests, 1)
        _check("tokens", self._tokens, 1)  # a key in debt hears so before any work is done
        if self._requests is not None:
            self._requests.spend(1)

    def check_tokens(self, amount: int) -> None:
        """Raises 429 if a prompt of `amount` tokens may not come now."""
        _check("tokens", self._tokens, amount)

    def spend_tokens(self, amount: int) -> None:
        if self._tokens is not None:
            self._tokens.spend(amount)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-…`, as OpenAI sends them with every answer."""
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = shown_duration(bucket.seconds_until(bucket.limit))
        return headers


class Rates:
    """The allowances of all keys, made when a key is first used."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}

    def of(self, key: str | None) -> Allowance:
        """The key's allowance; without a key there is no limit."""
        if key is None:
            return Allowance()
        if key not in self._allowances:
            self._allowances[key] = Allowance(self._bucket(self._requests), self._bucket(self._tokens))
        return self._allowances[key]

    def _bucket(self, per_minute: int | None) -> TokenBucket | None:
        return None if per_minute is None else TokenBucket(per_minute, self._clock)


def shown_duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    shown = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{minutes:.0f}m{shown}s" if minutes else f"{shown}s"


def _check(what: str, bucket: TokenBucket | None, amount: int) -> None:
    if bucket is None or bucket.level >= amount:
        return
    flag = f"--max-{what}-per-minute-per-key"
    if amount > bucket.limit:
        message = (
            f"the request has {amount} {what} and this key may have {bucket.limit} per minute: "
            f"send a shorter one, or raise {flag}"
        )
        headers = {"x-should-retry": "false"}  # OpenAI's clients would try again in vain
    else:
        seconds = bucket.seconds_until(amount)
        message = (
            f"this key may have {bucket.limit} {what} per minute: try again in {shown_duration(seconds)}"
        )
        headers = {
            "Retry-After": str(max(1, math.ceil(seconds))),
            "retry-after-ms": str(math.ceil(seconds * 1000)),
        }
    raise ApiError(429, message, kind=what, code="rate_limit_exceeded", headers=headers)


# ---------------------------------------------------------------------- keys


class Keys:
    """Compares digests, all of them each time: how long it takes says nothing about the keys."""

    def __init__(self, keys: Iterable[str], max_concurrent: int | None = None) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._max_concurrent = max_concurrent
        self._active: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, offered: bytes | None) -> str | None:
        """The name under which a key may appear in logs; None if it is no key."""
        digest = _digest(offered or b"")
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:12] if offered and any(matches) else None

    @contextmanager
    def hold(self, name: str | None) -> Iterator[None]:
        """One request of this key, while it lasts. Raises 429 past the limit."""
        limit = self._max_concurrent
        if name is None or limit is None:
            yield
            return
        if self._active[name] >= limit:
            raise ApiError(
                429,
                f"this key has {limit} requests under way already: wait for one to end",
                code="concurrency_limit",
                headers={"Retry-After": "1"},
            )
        self._active[name] += 1
        try:
            yield
        finally:
            self._active[name] -= 1
            if not self._active[name]:
                del self._active[name]


def read_key_file(path: str) -> tuple[str, ...]:
    """One key a line; empty lines and comments (#) are skipped."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read ({error})") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: holds no key: write one a line")
    return keys


def offered_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """From `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic)."""
    values = {name.lower(): value for name, value in headers}
    scheme, _, key = values.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return values.get(b"x-api-key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---------------------------------------------------------------------- the request


@dataclass(slots=True)
class RequestContext:
    """Made by the middleware for each request; endpoints add what the log should say."""

    request_id: str
    key: str | None = None  # the key's name, not the key
    allowance: Allowance = field(default_factory=Allowance)  # what that key may still have this minute
    keep_alive: float = 15.0  # seconds of silence on a stream before a comment is sent; 0: never
    arrival: float = field(default_factory=time.monotonic)
    held: ExitStack = field(default_factory=ExitStack)  # the request's place among those of its key
    facts: dict[str, object] = field(default_factory=dict)  # for the log line: token counts, finish reasons
    warnings: list[str] = field(default_factory=list)  # for the response's headers; `add_warning` adds them

    def note_error(self, error: ApiError) -> None:
        """For the log and the trace: which error ended it."""
        self.facts["error"] = error.code or error.kind


def context_of(request: Request) -> RequestContext:
    return request.scope["quire.context"]


def add_warning(request: Request, message: str) -> None:
    """Says in a `Warning` header what of the request has no effect. Only before the response begins.

    At most MAX_WARNINGS are sent, each once, as printable ASCII of at most MAX_WARNING_CHARACTERS.
    """
    warnings = context_of(request).warnings
    shown = _UNPRINTABLE.sub("?", message)[:MAX_WARNING_CHARACTERS]
    if shown not in warnings and len(warnings) < MAX_WARNINGS:
        warnings.append(shown)


def warn_without_effect(request: Request, body: object, names: Mapping[str, str]) -> None:
    """Warns of each of these fields that a request has set; `names` says why it has no effect."""
    for name, reason in names.items():
        if getattr(body, name) not in (None, False):
            add_warning(request, f"{name} has no effect: {reason}")


def path_of(scope: Scope) -> str:
    """The path below --root-path, whether or not a proxy cut that off."""
    root, path = scope.get("root_path", ""), scope["path"]
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def error_reply(scope: Scope, error: ApiError) -> JsonReply:
    """An error in the shape of the API that the path belongs to."""
    context: RequestContext = scope["quire.context"]
    context.note_error(error)
    if path_of(scope).startswith(OLLAMA):
        return JsonReply({"error": str(error)}, status_code=error.status, headers=error.headers)
    if not speaks_anthropic(path_of(scope), scope["headers"]):
        return JsonReply(error.body(), status_code=error.status, headers=error.headers)
    body = anthropic_body(error, context.request_id)
    headers = {**error.headers, REQUEST_ID: context.request_id}
    return JsonReply(body, status_code=error.status, headers=headers)


async def until_gone(receive: Receive) -> None:
    """Returns when the connection is closed. Only for requests whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


# ---------------------------------------------------------------------- middleware


_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Probes, scrapers, documents and the page's files ask without a key; everything else needs one where keys are set.
OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect"}
)
ADMIN_PATHS = frozenset(
    {
        "/reset_prefix_cache",
        "/check_integrity",
        "/start_step_log",
        "/stop_step_log",
        "/drain_replica",
        "/restart_replicas",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
MODEL_CHANGES = frozenset({"/v1/models/load", "/v1/models/unload"})  # of a server with several models
_WITHOUT_VERSION = re.compile(
    r"/(chat/completions|completions|embeddings|classify|score|rerank|fill-mask|models|responses|conversations|messages"
    r"|files|uploads|vector_stores|batches)(/|$)"
)


_UPLOADED = re.compile(r"/v1/(files|uploads/[^/]+/parts)")
PAGE_FILES = "/page/"
ENGINE_PATHS = "/v1/engine"
_OFF = "operators' calls are off: start the server with --admin-key to allow them"
_LOCAL = frozenset({"127.0.0.1", "::1", "localhost", "[::1]"})
_FORWARDED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


def needs_admin(method: str, path: str) -> bool:
    """Whether this is an operators' call: one that changes the server for all keys, or shows what all of them do."""
    if path in ADMIN_PATHS or path.startswith(ENGINE_PATHS) or (method == "POST" and path in MODEL_CHANGES):
        return True
    return method == "DELETE" and path.startswith("/v1/models/")


def is_local(scope: Scope) -> bool:
    """Whether a program on this machine asks, by a local name and without a proxy between."""
    headers = dict(scope["headers"])
    address = (scope.get("client") or ("", 0))[0]
    host = headers.get(b"host", b"").decode("latin-1")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return address in _LOCAL and name in _LOCAL and _FORWARDED.isdisjoint(headers)


def identified(path: str, scope: Scope, keys: Keys, admin: Keys) -> str | None:
    """The name of the request's key; None where it needs none. Raises 401 or 403."""
    if is_open(path) or scope["method"] == "OPTIONS":
        return None
    is_admin = needs_admin(scope["method"], path)
    if is_admin and not admin:
        may_be_local = path.startswith(ENGINE_PATHS) or path in MODEL_CHANGES
        if not (may_be_local and is_local(scope)):
            raise ApiError(403, f"{_OFF}, or ask on the server's own machine" if may_be_local else _OFF)
        is_admin = False
    wanted = admin if is_admin else keys
    if not wanted:
        return None
    name = wanted.identify(offered_key(scope["headers"]))
    if name is None:
        kind = "the admin key" if is_admin else "an API key"
        raise ApiError(
            401,
            f"this needs {kind}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return name


def add_version(scope: Scope) -> None:
    """Clients whose base URL lacks /v1 mean the same paths."""
    path = path_of(scope)
    if _WITHOUT_VERSION.match(path):
        root = scope["path"].removesuffix(path)
        scope["path"] = f"{root}/v1{path}"


def _take_for_json(scope: Scope) -> None:
    """Ollama reads JSON of any type, as curl sends it. A page of another origin, which names that, must say JSON:
    a browser sends other types without asking this server first."""
    if not path_of(scope).startswith(OLLAMA) or scope["method"] != "POST":
        return
    if all(name != b"origin" for name, _ in scope["headers"]):
        rest = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*rest, (b"content-type", b"application/json")]


class RequestMiddleware:
    """Assigns request ids, authenticates, enforces limits, logs, and turns unhandled exceptions into 500s."""

    def __init__(self, app: ASGIApp, service: "Service", keys: Keys | None = None) -> None:
        """With `keys` in the place of the settings' own there are no rates."""
        settings = service.settings
        per_minute = (settings.max_requests_per_minute_per_key, settings.max_tokens_per_minute_per_key)
        self._app = app
        self._service = service
        self._settings = settings
        self._metrics = service.metrics
        self._keys = Keys(settings.api_keys, settings.max_concurrent_per_key) if keys is None else keys
        self._admin = Keys([settings.admin_key] if settings.admin_key else [])
        self._rates = Rates(*per_minute) if keys is None else Rates()
        self._root_path = settings.root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path  # routing takes it off again where a proxy left it on
        add_version(scope)
        _take_for_json(scope)
        context = RequestContext(request_id_of(scope), keep_alive=self._settings.sse_keep_alive)
        scope["quire.context"] = context
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
            self._service.freed.request_ended()

    async def _authorized(
        self, scope: Scope, context: RequestContext, receive: Receive, response: "_Response"
    ) -> None:
        path = path_of(scope)
        context.key = identified(path, scope, self._keys, self._admin)
        if not _UPLOADED.fullmatch(path):  # those bodies go to disk as they come, with limits of their own
            text_limit = partial(self._service.text_limit, path)
            receive = limited(scope, receive, self._settings.max_body_bytes, text_limit)
        with context.held as held:
            # Reads and cancellations are always possible, also for a key whose background responses fill its limit.
            if scope["method"] == "POST" and not path.endswith("/cancel"):
                held.enter_context(self._keys.hold(context.key))
            if not needs_admin(scope["method"], path):
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

    def _note(self, scope: Scope, context: RequestContext, status: int) -> None:
        # never the raw path, which would let clients create metric series
        route = getattr(scope.get("route"), "path", None) or "other"
        self._metrics.http_request(route, status)
        if is_open(path_of(scope)):
            return
        self._metrics.last_used = time.monotonic()
        if self._service.traces is not None:
            self._service.traces.note(context, scope["method"], route, status, scope["headers"])
        if self._settings.log_requests:
            seconds = time.monotonic() - context.arrival
            facts = {"request_id": context.request_id, "status": status, "seconds": round(seconds, 4)}
            if context.key is not None:
                facts["key"] = context.key
            facts.update(context.facts)
            shown = " ".join(f"{name}={value}" for name, value in facts.items())
            method, path = scope["method"], _shown_path(scope)
            log.info("%s %s %s", method, path, shown, extra={"method": method, "path": path, **facts})


class _Response:
    """Adds the request's id, its warnings and its key's rate limits to the response's headers; remembers the status."""

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
            for warning in self._context.warnings:
                headers.append("Warning", f"299 quire {_quoted(warning)}")
        return self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """A response that has begun cannot be taken back: it ends where it is."""
        if self.status == 499:
            await error_reply(scope, error)(scope, receive, self.send)


def _quoted(text: str) -> str:
    """A quoted-string of HTTP."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def request_id_of(scope: Scope) -> str:
    """The caller's own, if it is fit for a header and a log line."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return f"req-{uuid.uuid4().hex}"


def _shown_path(scope: Scope) -> str:
    """Fit for a line of the log: a path may hold line breaks and worse."""
    return quote(path_of(scope))
