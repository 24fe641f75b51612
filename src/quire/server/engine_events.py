"""GET /v1/engine/events: the engine's feed. GET /v1/engine/requests/{id}: a request's tokens and block tables."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire import __version__
from quire.core.errors import EngineDead
from quire.link.client import EngineClient
from quire.link.feed_listeners import FeedListener
from quire.link.messages import ShownSequence, unpack_ints
from quire.server.access import context_of, until_gone
from quire.server.errors import ApiError, as_api_error
from quire.server.logprobs import token_text
from quire.server.operations import engine_call
from quire.server.reply import ERRORS, JsonReply, SseWriter, event
from quire.server.service import Service


def engine_events_router(service: Service) -> APIRouter:
    """They need the admin key; on a server without one they are for clients on the same machine."""
    router = APIRouter(tags=["engine"])

    @router.get("/v1/engine", responses=ERRORS)
    async def engine() -> Response:
        """What the engine's start decided."""
        model = service.model
        ready, adapters = model.ready, service.client.adapters
        return JsonReply(
            {
                "model": model.names[0],
                "version": __version__,
                "status": service.status,
                "replicas": len(service.client.engines),
                "max_model_len": ready.max_model_len,
                "max_num_seqs": ready.max_num_seqs,
                "pool": ready.pool,
                "weights_bytes": ready.start.weights_bytes,
                "lora": {"enabled": adapters.enabled, "max_loras": adapters.max_adapters},
                "report": ready.lines,
            }
        )

    @router.get("/v1/engine/events", responses=ERRORS)
    async def events(replica: int = 0) -> Response:
        """What the engine does, as server-sent events: the first is whole, the others say what changed."""
        engines = service.client.engines
        if not 0 <= replica < len(engines):
            raise ApiError(
                400, f"replica is {replica}: this server has 0 to {len(engines) - 1}", param="replica"
            )
        with engine_call():
            service.refuse_if_draining()
            if not engines[replica].is_ready:
                raise EngineDead(f"{engines[replica].status}: try again in some seconds")
        return FeedStream(engines[replica])

    @router.get("/v1/engine/requests/{request_id}", responses=ERRORS)
    async def engine_request(request_id: str, request: Request) -> Response:
        """Tokens and block tables of a request that has not ended; text only for its own key and for operators."""
        with engine_call():
            engines = service.client.engines
            serving = [engine for engine in engines if engine.is_ready] or engines
            shown_by = [await engine.show_request(request_id) for engine in serving]
        sequences = next((sequences for sequences in shown_by if sequences), ())
        if not sequences:
            raise ApiError(
                404, f"no request {request_id[:80]!r} is open: it may have ended", code="not_found"
            )
        settings = service.settings
        may_read = bool(settings.admin_key) or not settings.api_keys
        key = context_of(request).key
        shown = [_shown(sequence, service, may_read or sequence.tenant == key) for sequence in sequences]
        return JsonReply({"id": request_id, "sequences": shown})

    return router


def _shown(sequence: ShownSequence, service: Service, with_text: bool) -> dict[str, object]:
    token_ids = unpack_ints(sequence.token_ids)
    shown = {
        "index": sequence.index,
        "num_tokens": len(token_ids),
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_computed": sequence.num_computed,
        "blocks": unpack_ints(sequence.block_ids),
    }
    tokenizer = service.model.prompts.tokenizer
    if with_text and tokenizer is not None:
        shown["tokens"] = [token_text(token_id, tokenizer) for token_id in token_ids]
    return shown


class FeedStream(Response):
    """Ends when the client leaves; an engine that ends closes it with an event that has `error`."""

    media_type = "text/event-stream"

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = SseWriter(send, self.raw_headers, scope["quire.context"].keep_alive)
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            with self._engine.feed.listen() as listener:
                gone.add_done_callback(lambda _: listener.fail(ConnectionResetError()))
                async with writer:
                    await self._write(writer, listener)
        finally:
            gone.cancel()
        if not gone.done() or gone.cancelled():
            await writer.end()

    async def _write(self, writer: SseWriter, listener: FeedListener) -> None:
        try:
            while True:
                await writer.send(b"data: " + await listener.next() + b"\n\n")
        except OSError:  # the client left
            return
        except Exception as fault:
            await writer.send(event(as_api_error(fault).body()))
