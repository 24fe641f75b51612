"""ModelsApp: one port before several models. A request goes to the server of the model that it names."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire import __version__
from quire.core.errors import EngineDead, QuireError
from quire.fleet.model_set import CannotStart, ModelProcess, ModelSet, UnknownModel, keep_alive_seconds
from quire.link.http_client import ConnectionLost, HttpClient
from quire.link.http_proxy import (
    MAX_BODY_BYTES,
    ClientLeft,
    Reply,
    read_body,
    request_head,
    request_target,
    while_connected,
)
from quire.server.access import (
    ENGINE_PATHS,
    MODEL_CHANGES,
    PAGE_FILES,
    Keys,
    RequestContext,
    add_version,
    error_reply,
    identified,
    is_local,
    path_of,
    request_id_of,
)
from quire.server.errors import ApiError, Unavailable, as_api_error
from quire.server.models import anthropic_model, anthropic_page, for_anthropic
from quire.server.ollama import OLLAMA_VERSION, details, shown_in_short
from quire.server.page import REPORTS, file_reply, laboratory_reply, wants_page
from quire.server.protocol.models import Model
from quire.server.reply import JsonReply
from quire.server.settings import ServerSettings

WAITED = b"x-quire-model-wait"  # seconds that a request waited for its model's start
SCRAPE_SECONDS = 5.0
MODELS = "/v1/models"
FILES = ("/v1/files", "/v1/uploads", "/v1/vector_stores", "/v1/batches", "/v1/fine_tuning")


class Named(msgspec.Struct):
    model: str | None = None
    name: str | None = None  # of older clients of Ollama, in /api/show
    keep_alive: int | float | str | None = None


class ModelsApp:
    """The page, `/health`, lists of models, `/v1/models/load` and `unload` are its own; the rest goes to a model.

    A model is not started for a request that has no key, nor for one that only reads; files aside, which a model's
    server keeps.
    """

    def __init__(self, models: ModelSet, settings: ServerSettings) -> None:
        self._models, self._settings = models, settings
        self._keeper = next((entry.name for entry in models.entries if "--data-dir" in entry.flags), None)
        self._keys = Keys(settings.api_keys)
        self._admin = Keys([settings.admin_key] if settings.admin_key else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["root_path"] = self._settings.root_path.rstrip("/")
        scope["quire.context"] = RequestContext(request_id_of(scope))
        add_version(scope)
        try:
            identified(path_of(scope), scope, self._keys, self._admin)
            body = await read_body(receive)
            if body is None:
                raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")
            own = await self._own(scope, body)
            if own is not None:
                await own(scope, receive, send)
            else:
                await while_connected(self._passed_on(scope, body, send), receive)
        except ClientLeft:
            return
        except (ApiError, QuireError) as error:
            await error_reply(scope, _as_api_error(error))(scope, receive, send)

    async def _own(self, scope: Scope, body: bytes) -> Response | None:
        """The answer of a request that needs no model."""
        path, method = path_of(scope), scope["method"]
        if method == "POST" and path in MODEL_CHANGES:
            return await self._changed(path, _named(body).model)
        if method == "POST" and path == "/api/show":
            shown = _named(body)
            model = self._models.named(shown.model or shown.name)
            return JsonReply(shown_in_short(model.task)) if model.client is None else None
        if method not in ("GET", "HEAD"):
            return None
        if path in ("/health", "/ready"):
            states = {name: model.state for name, model in self._models.models.items()}
            return JsonReply({"status": "ready", "models": states})
        if path == "/version":
            return JsonReply({"version": __version__})
        if path == "/api/version":
            return JsonReply({"version": OLLAMA_VERSION, "quire": __version__})
        if path == "/metrics":
            return Response(await self._metrics(), media_type="text/plain; version=0.0.4")
        if self._settings.page and (path == REPORTS or path.startswith(f"{REPORTS}/")):
            return await laboratory_reply(path[len(REPORTS) + 1 :])
        if path == "/" or path.startswith(PAGE_FILES):
            return self._page(path, Request(scope))
        described, request = self._models.described(), Request(scope)
        if path == MODELS:
            if for_anthropic(request):
                return JsonReply(anthropic_page(cast("list[Model]", described), request.query_params))
            return JsonReply({"object": "list", "data": described})
        if path in ("/api/tags", "/api/ps"):
            listed = [model for model in described if path == "/api/tags" or model["state"] == "ready"]
            return JsonReply({"models": [_for_ollama(model) for model in listed]})
        if path.startswith(f"{MODELS}/"):
            name = self._models.named(path.removeprefix(f"{MODELS}/")).entry.name
            asked = next(model for model in described if model["id"] == name)
            return JsonReply(anthropic_model(cast("Model", asked)) if for_anthropic(request) else asked)
        return None

    async def _metrics(self) -> str:
        """Of all models that run; each sample has its model's name."""
        clients = [model.client for model in self._models.models.values() if model.client is not None]
        return merged_metrics(await asyncio.gather(*map(_scraped, clients)))

    def _page(self, path: str, request: Request) -> Response:
        if path == "/" and not wants_page(self._settings, request):
            return JsonReply({"name": "quire", "version": __version__, "docs": "/docs"})
        try:
            if not self._settings.page:
                raise HTTPException(404)
            name = "index.html" if path == "/" else path.removeprefix(PAGE_FILES)
            return file_reply(self._settings, name, request)
        except HTTPException:
            raise ApiError(404, f"there is no {path[:80]} here", code="not_found") from None

    async def _passed_on(self, scope: Scope, body: bytes, send: Send) -> None:
        path, named = path_of(scope), _named(body)
        if scope["method"] in ("GET", "HEAD", "OPTIONS") and not path.startswith(FILES):
            asked = Request(scope).query_params.get("model")
            running = self._models.running(asked)
            if running is None or running.client is None:
                what = "no model runs now: ask one" if asked is None else f"{asked} does not run now: ask it"
                raise Unavailable(f"{what}, or load one", "no_model", retry_seconds=1)
            if path.startswith(ENGINE_PATHS):  # a page that is left open holds no model
                await self._forward(running, running.client, Reply(send), scope, body)
                return
            model = running
        else:
            model = self._models.named(named.model or (self._keeper if path.startswith(FILES) else None))
        began = time.monotonic()
        client = await self._models.acquire(model)
        waited = time.monotonic() - began
        try:
            await self._forward(model, client, Reply(send, [(WAITED, f"{waited:.3f}".encode())]), scope, body)
        finally:
            self._models.release(model, keep_alive_seconds(named.keep_alive))

    async def _forward(
        self, model: ModelProcess, client: HttpClient, reply: Reply, scope: Scope, body: bytes
    ) -> None:
        target, head = request_target(scope), request_head(scope, names_client=not is_local(scope))
        try:
            async with client.send(scope["method"], target, body or None, head) as response:
                await reply.pass_back(response)
        except ConnectionLost as fault:
            message = f"the server of {model.entry.name} was lost ({fault}): try again"
            if not reply.has_begun:
                raise Unavailable(message, "engine_down", retry_seconds=1) from fault
            await reply.break_off(message)

    async def _changed(self, path: str, name: str | None) -> Response:
        model = self._models.named(name)
        if path.endswith("/unload"):
            await self._models.unload(model)
        else:
            await self._models.acquire(model)
            self._models.release(model)
        state = {"model": model.entry.name, "state": model.state, "start_seconds": model.start_seconds}
        return JsonReply(state)


def _as_api_error(error: ApiError | QuireError) -> ApiError:
    match error:
        case UnknownModel():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case CannotStart():  # OpenAI's clients would try again in vain, and each time stop another model for it
            return ApiError(503, str(error), code="model_not_started", headers={"x-should-retry": "false"})
        case EngineDead():
            return Unavailable(str(error), "engine_down")
    return as_api_error(error)


_decode = msgspec.json.Decoder(Named).decode


def _named(body: bytes) -> Named:
    """A body that is no JSON goes to the model that was used last, whose server says what is wrong with it."""
    try:
        return _decode(body) if body else Named()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Named()


async def _scraped(client: HttpClient) -> str:
    """Nothing of a server that does not answer: its process may just end."""
    with suppress(ConnectionLost, TimeoutError):
        async with asyncio.timeout(SCRAPE_SECONDS), client.send("GET", "/metrics") as response:
            return (await response.read()).decode()
    return ""


def merged_metrics(texts: Iterable[str]) -> str:
    """One text of several in Prometheus's format, which wants all samples of a metric together."""
    samples: dict[str, str] = {}
    for text in texts:
        for part in text.split("# HELP ")[1:]:
            about, kind, rest = part.split("\n", 2)
            head = f"# HELP {about}\n{kind}\n"
            samples[head] = samples.get(head, "") + rest
    return "".join(map("".join, samples.items()))


def _for_ollama(described: Mapping[str, Any]) -> dict[str, Any]:
    name = described["id"]
    return {
        "name": name,
        "model": name,
        "size": described["memory_bytes"] or 0,
        "digest": "",
        "details": details(described["task"]),
    }
