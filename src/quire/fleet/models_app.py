"""ModelsApp: one port before several models. A request goes to the server of the model that it names."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.core.errors import EngineDead, InvalidRequest, QuireError
from quire.fleet.model_set import ModelProcess, ModelSet, keep_alive_seconds
from quire.fleet.proxy import (
    MAX_BODY_BYTES,
    ClientLeft,
    Receive,
    Reply,
    Scope,
    Send,
    answer,
    read_body,
    refuse,
    request_head,
    request_target,
    until_gone,
)
from quire.link.http_client import ConnectionLost

WAITED = b"x-quire-model-wait"  # seconds that a request waited for its model's start
CHANGES = ("/v1/models/load", "/v1/models/unload")
LISTS = ("/v1/models", "/models", "/api/tags")


class Named(msgspec.Struct):
    model: str | None = None
    keep_alive: int | float | str | None = None


class ModelsApp:
    """`/health`, lists of models, `/v1/models/load` and `unload` are its own; everything else goes to a model.

    `refusal`: what a request lacks to be let in, if anything; a model is not started for one that has no key.
    """

    def __init__(
        self, models: ModelSet, refusal: Callable[[Scope, bool], str | None] = lambda scope, changes: None
    ) -> None:
        self._models, self._refusal = models, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        try:
            body = await read_body(receive)
        except ClientLeft:
            return
        if body is None:
            await refuse(send, 413, f"the body has more than {MAX_BODY_BYTES} bytes", "body_too_large")
        elif why := self._refusal(scope, path in CHANGES):
            await refuse(send, 401, why, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        elif method in ("GET", "HEAD") and path in ("/health", "/ready"):
            await answer(send, 200, msgspec.json.encode({"status": "ready", "models": self._states()}))
        elif (method == "GET" and path in LISTS) or (method == "GET" and path == "/api/ps"):
            await self._list(path, send)
        elif method == "POST" and path in CHANGES:
            await self._change(path, body, send)
        else:
            await self._beside_leaving(self._forward(scope, body, send), receive)

    async def _beside_leaving(self, work: Any, receive: Receive) -> None:
        """Ends the work when the client leaves."""
        gone, forwarding = asyncio.create_task(until_gone(receive)), asyncio.create_task(work)
        try:
            await asyncio.wait({gone, forwarding}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            for task in (gone, forwarding):
                task.cancel()
            await asyncio.gather(gone, forwarding, return_exceptions=True)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        named = _named(body)
        try:
            model = self._models.named(named.model)
        except InvalidRequest as error:
            await refuse(send, 404, str(error), "model_not_found")
            return
        began = time.monotonic()
        try:
            client = await self._models.acquire(model)
        except QuireError as error:
            await refuse(send, 503, str(error), "engine_down", {"Retry-After": "5"})
            return
        waited = time.monotonic() - began
        reply = Reply(send, [(WAITED, f"{waited:.3f}".encode())])
        try:
            target, head = request_target(scope), request_head(scope)
            async with client.send(scope["method"], target, body or None, head) as response:
                async for piece in response.pieces():
                    if not reply.has_begun:
                        await reply.begin(response)
                    await reply.send_piece(piece)
                await reply.end(response)
        except ConnectionLost as fault:
            message = f"the server of {model.entry.name} was lost: {fault}"
            if reply.has_begun:
                await reply.break_off(message)
            else:
                await refuse(send, 503, message, "engine_down", {"Retry-After": "1"})
        finally:
            self._models.release(model, keep_alive_seconds(named.keep_alive))

    def _states(self) -> Mapping[str, str]:
        return {name: model.state for name, model in self._models.models.items()}

    async def _list(self, path: str, send: Send) -> None:
        described = self._models.described()
        if path in ("/api/tags", "/api/ps"):
            running = [one for one in described if path == "/api/tags" or one["state"] == "ready"]
            listed: Any = {"models": [_for_ollama(one) for one in running]}
        else:
            listed = {"object": "list", "data": described}
        await answer(send, 200, msgspec.json.encode(listed))

    async def _change(self, path: str, body: bytes, send: Send) -> None:
        try:
            model = self._models.named(_named(body).model)
            await self._changed(path, model)
        except InvalidRequest as error:
            await refuse(send, 404 if "exist" in str(error) else 400, str(error), "model_not_found")
        except EngineDead as error:
            await refuse(send, 503, str(error), "engine_down", {"Retry-After": "5"})
        else:
            state = {"model": model.entry.name, "state": model.state, "start_seconds": model.start_seconds}
            await answer(send, 200, msgspec.json.encode(state))

    async def _changed(self, path: str, model: ModelProcess) -> None:
        if path.endswith("/unload"):
            await self._models.unload(model)
        else:
            await self._models.acquire(model)
            self._models.release(model)


_decode = msgspec.json.Decoder(Named).decode


def _named(body: bytes) -> Named:
    """A body that is no JSON goes to the model that was used last, whose server says what is wrong with it."""
    try:
        return _decode(body) if body else Named()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Named()


def _for_ollama(described: Mapping[str, Any]) -> dict[str, Any]:
    details = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    name = described["id"]
    return {
        "name": name,
        "model": name,
        "size": described["memory_bytes"] or 0,
        "digest": "",
        "details": details,
    }
