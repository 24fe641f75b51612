"""Operators' endpoints: health and metrics for everyone, cache and adapter calls under a key of their own."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.responses import Response

from quire import __version__
from quire.core.errors import EngineDead, InvalidRequest
from quire.link.messages import Done
from quire.server.errors import ApiError, Unavailable
from quire.server.page import file_reply, wants_page
from quire.server.reply import ERRORS, JsonReply
from quire.server.service import Service


class LoadLora(BaseModel):
    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096, description="inside --lora-dir, or relative to it")


class DrainReplica(BaseModel):
    replica: int
    drain: bool = Field(True, description="false: it gets requests again")


class RestartReplicas(BaseModel):
    replica: int | None = Field(None, description="default: all of them, one after the other")


class UnloadLora(BaseModel):
    lora_name: str = Field(max_length=200)


def operations_router(service: Service) -> APIRouter:
    """Reads are for probes, scrapers and people; every POST needs the admin key."""
    router = APIRouter(tags=["operations"])

    @router.head("/", include_in_schema=False)
    @router.get("/")
    async def root(request: Request) -> Response:
        """What answers here; for a browser the page."""
        if wants_page(service.settings, request):
            return file_reply(service.settings, "index.html", request)
        return JsonReply({"name": "quire", "version": __version__, "docs": "/docs"})

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={503: {"description": "The engine cannot be started."}})
    async def health() -> Response:
        """Alive: the server answers, and an engine that died is being restarted."""
        left = service.seconds_left
        body = {"status": service.status} | ({} if left is None else {"seconds_left": round(left)})
        return JsonReply(body, status_code=503 if service.is_sick else 200)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses={503: {"description": "Not now; `status` says why."}})
    async def ready() -> Response:
        """Able to serve a request now."""
        return JsonReply({"status": service.status}, status_code=200 if service.is_ready else 503)

    @router.get("/version")
    async def version() -> Response:
        return JsonReply({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(service.metrics.rendered(service.models.engines), media_type=CONTENT_TYPE_LATEST)

    @router.post("/reset_prefix_cache", responses=ERRORS)
    async def reset_prefix_cache() -> Response:
        """Drops all cached prefixes; running requests go on."""
        with engine_call():
            await service.client.reset_prefix_cache()
        return JsonReply({"status": "ok"})

    @router.post("/check_integrity", responses=ERRORS)
    async def check_integrity() -> Response:
        """Recounts every block of the pool, and returns how many are in use; of replicas together."""
        client = service.client
        with engine_call():
            serving = [engine for engine in client.engines if engine.is_ready] or client.engines
            recounts = [await engine.check_integrity() for engine in serving]
        return JsonReply(_recounted(recounts, sum(engine.num_open for engine in client.engines)))

    @router.post("/v1/load_lora_adapter", responses=ERRORS)
    async def load_lora_adapter(body: LoadLora) -> Response:
        """Loads an adapter without stopping requests, and answers when it is served under this name.

        A known name keeps its old adapter until then.
        """
        service.refuse_if_draining()
        if body.lora_name in service.model.names:
            raise InvalidRequest(f"{body.lora_name} is the model itself: choose another name", "lora_name")
        with engine_call():
            await service.client.load_adapter(body.lora_name, body.lora_path)
        return JsonReply({"status": "ok", "lora_name": body.lora_name})

    @router.post("/v1/unload_lora_adapter", responses=ERRORS)
    async def unload_lora_adapter(body: UnloadLora) -> Response:
        """Removes an adapter, also one that is still being loaded; requests that run with it go on."""
        with engine_call():
            await service.client.unload_adapter(body.lora_name)
        return JsonReply({"status": "ok", "lora_name": body.lora_name})

    _add_step_log(router, service)
    if service.settings.has_replicas:
        _add_replicas(router, service)
    return router


def _add_replicas(router: APIRouter, service: Service) -> None:
    replicas: Any = service.models.main.client  # a ReplicaSet

    @router.get("/replicas")
    async def list_replicas() -> Response:
        """Each replica's state, what was sent to it and what it has to do."""
        described = [replica.described() for replica in replicas.replicas]
        return JsonReply({"policy": replicas.policy, "replicas": described})

    @router.post("/drain_replica", responses=ERRORS)
    async def drain_replica(body: DrainReplica) -> Response:
        """Sends a replica no new requests, or again; its open requests go on."""
        replicas.numbered(body.replica).draining = body.drain
        return JsonReply({"status": "ok"})

    @router.post("/restart_replicas", responses=ERRORS)
    async def restart_replicas(body: RestartReplicas) -> Response:
        """Restarts replicas one after the other, each once its requests have ended; answers when the last serves."""
        with engine_call():
            await asyncio.shield(replicas.roll(None if body.replica is None else [body.replica]))
        return JsonReply({"status": "ok"})


def _add_step_log(router: APIRouter, service: Service) -> None:
    @router.post("/start_step_log", responses=ERRORS)
    async def start_step_log() -> Response:
        """Records when each step of the engine runs and what it computes, until it is stopped."""
        with engine_call():
            await service.client.start_step_log()
        return JsonReply({"status": "ok"})

    @router.post("/stop_step_log", responses=ERRORS)
    async def stop_step_log() -> Response:
        """Returns the recorded steps, the last 50,000 at most; `now` is the time of this answer on their clock."""
        with engine_call():
            steps = await service.client.stop_step_log()
        return JsonReply({"now": time.perf_counter(), "steps": [asdict(step) for step in steps]})


def _recounted(recounts: Sequence[Done], num_open: int) -> dict[str, object]:
    """The pools at that step; raises what is wrong with one."""
    blocks: Counter[str] = Counter()
    for recount in recounts:
        if recount.error is not None:
            raise ApiError(500, f"the pool is not whole: {recount.error}", code="integrity")
        blocks.update(recount.blocks)
    return {
        "status": "ok",
        "step": max(recount.stats.steps.num_steps for recount in recounts),
        "blocks": blocks,
        "blocks_used": sum(recount.stats.pool.num_blocks_used for recount in recounts),
        "sequences_running": sum(recount.queue.num_running for recount in recounts),
        "requests_waiting": sum(recount.queue.num_waiting for recount in recounts),
        "requests_open": num_open,
    }


@contextmanager
def engine_call() -> Iterator[None]:
    """An engine that is down makes a call unavailable, not failed."""
    try:
        yield
    except EngineDead as fault:
        raise Unavailable(str(fault), "engine_down") from None
