"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter
from starlette.responses import Response

from quire.server.documents import ERRORS, answers
from quire.server.encoders import ServedEncoder
from quire.server.protocol.models import Model, ModelList
from quire.server.reply import JsonReply
from quire.server.service import ServedModel, Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses={**answers(ModelList), **ERRORS})
    async def list_models() -> Response:
        """All that a request may name; an embedding model under the first of its names."""
        data: list[Model] = []
        if service.encoders.main is None:
            model = service.model
            data = [_described(name, model) for name in model.names]
            data += [_described(name, model, model.names[0]) for name in service.client.adapters.names()]
        data += [_described(encoder.names[0], encoder) for encoder in service.encoders.all]
        found: ModelList = {"object": "list", "data": data}
        return JsonReply(found)

    @router.get("/v1/models/{model_id:path}", responses={**answers(Model), **ERRORS})
    async def retrieve_model(model_id: str) -> Response:
        if service.encoders.knows(model_id):
            return JsonReply(_described(model_id, service.encoders.find(model_id)))
        model = service.model_named(model_id)
        is_adapter = service.adapter_named(model_id) is not None
        return JsonReply(_described(model_id, model, model.names[0] if is_adapter else None))

    return router


def _described(name: str, model: ServedModel | ServedEncoder, parent: str | None = None) -> Model:
    """`parent`: the model that an adapter of this name belongs to."""
    found: Model = {"id": name, "object": "model", "created": model.created, "owned_by": "quire"}
    if model.ready is not None:
        found["max_model_len"] = model.ready.max_model_len
    if parent is not None:
        found["parent"] = parent
    return found
