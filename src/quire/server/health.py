"""GET /health, /ready, /version and /metrics: for probes, scrapers and people."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from quire import __version__
from quire.server.reply import JsonReply
from quire.server.service import Service


def health_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses={503: {"description": "The engine cannot be started."}})
    async def health() -> Response:
        """Alive: the server answers, and an engine that died is being restarted."""
        return JsonReply({"status": service.status}, status_code=503 if service.is_sick else 200)

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
        return Response(service.metrics.rendered(service.engines), media_type=CONTENT_TYPE_LATEST)

    return router
