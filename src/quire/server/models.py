"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter
from starlette.responses import Response

from quire.server.documents import ERRORS, answers
from quire.server.protocol.models import Model, ModelList
from quire.server.reply import JsonReply
from quire.server.service import ServedModel, Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses={**answers(ModelList), **ERRORS})
    async def list_models() -> Response:
        model = service.model
        found: ModelList = {"object": "list", "data": [_described(name, model) for name in model.names]}
        return JsonReply(found)

    @router.get("/v1/models/{model_id:path}", responses={**answers(Model), **ERRORS})
    async def retrieve_model(model_id: str) -> Response:
        return JsonReply(_described(model_id, service.model_named(model_id)))

    return router


def _described(name: str, model: ServedModel) -> Model:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "max_model_len": model.ready.max_model_len,
    }
