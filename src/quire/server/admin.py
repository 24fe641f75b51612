"""Operators' calls, under a key of their own: POST /reset_prefix_cache and /check_integrity."""

from fastapi import APIRouter
from starlette.responses import Response

from quire.core.errors import EngineDead
from quire.server.documents import ERRORS
from quire.server.errors import ApiError, Unavailable
from quire.server.reply import JsonReply
from quire.server.service import Service


def admin_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.post("/reset_prefix_cache", responses=ERRORS)
    async def reset_prefix_cache() -> Response:
        """Forgets all cached prefixes; requests under way go on."""
        try:
            await service.client.reset_prefix_cache()
        except EngineDead as fault:
            raise Unavailable(str(fault), "engine_down") from None
        return JsonReply({"status": "ok"})

    @router.post("/check_integrity", responses=ERRORS)
    async def check_integrity() -> Response:
        """Recounts every block of the pool, and says how many are in use."""
        try:
            wrong = await service.client.check_integrity()
        except EngineDead as fault:
            raise Unavailable(str(fault), "engine_down") from None
        if wrong is not None:
            raise ApiError(500, f"the pool is not whole: {wrong}", code="integrity")
        client = service.client
        return JsonReply(
            {
                "status": "ok",
                "blocks_used": client.stats.pool.num_blocks_used,
                "sequences_running": client.queue.num_running,
                "requests_waiting": client.queue.num_waiting,
                "requests_open": client.num_open,
            }
        )

    return router
