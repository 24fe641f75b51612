"""Operators' calls about adapters: POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from quire.core.errors import EngineDead, InvalidRequest
from quire.server.documents import ERRORS
from quire.server.errors import Unavailable
from quire.server.reply import JsonReply
from quire.server.service import Service


class LoadLora(BaseModel):
    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096, description="inside --lora-dir, or relative to it")


class UnloadLora(BaseModel):
    lora_name: str


def adapters_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.post("/v1/load_lora_adapter", responses=ERRORS)
    async def load_lora_adapter(body: LoadLora) -> Response:
        """Reads an adapter, beside everything else, and answers when it is served under this name.

        A name that is known already means what it meant until then, and this one from then on.
        """
        service.refuse_if_draining()
        if body.lora_name in service.model.names:
            raise InvalidRequest(f"{body.lora_name} is the model itself: choose another name", "lora_name")
        try:
            await service.client.load_adapter(body.lora_name, body.lora_path)
        except EngineDead as fault:
            raise Unavailable(str(fault), "engine_down") from None
        return JsonReply({"status": "ok", "lora_name": body.lora_name})

    @router.post("/v1/unload_lora_adapter", responses=ERRORS)
    async def unload_lora_adapter(body: UnloadLora) -> Response:
        """Forgets an adapter, one that is still being loaded too; requests that run with it go on."""
        try:
            await service.client.unload_adapter(body.lora_name)
        except EngineDead as fault:
            raise Unavailable(str(fault), "engine_down") from None
        return JsonReply({"status": "ok", "lora_name": body.lora_name})

    return router
