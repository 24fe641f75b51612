"""create_app: endpoints, error shapes and middleware, put together."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire import __version__
from quire.core.errors import QuireError
from quire.observe.logs import get_logger
from quire.server.access import Keys, Origins, RequestMiddleware, context_of, error_reply, path_of
from quire.server.chat import chat_router
from quire.server.completions import completions_router
from quire.server.conversations import conversations_router
from quire.server.encoders import embeddings_router, scoring_router
from quire.server.engine_events import engine_events_router
from quire.server.errors import ApiError, ClientGone, as_api_error, from_validation
from quire.server.messages import messages_router
from quire.server.models import models_router, tokens_router
from quire.server.ollama import ollama_router
from quire.server.operations import operations_router
from quire.server.page import page_router
from quire.server.responses.endpoints import responses_router
from quire.server.retrieval.routes import data_router
from quire.server.service import Service
from quire.server.stored_chats import stored_chats_router

log = get_logger(__name__)
ROUTERS = (
    chat_router,
    stored_chats_router,
    completions_router,
    responses_router,
    conversations_router,
    messages_router,
    embeddings_router,
    scoring_router,
    data_router,
    models_router,
    tokens_router,
    ollama_router,
    operations_router,
    engine_events_router,
    page_router,
)


def create_app(service: Service, keys: Keys | None = None) -> FastAPI:
    """With `keys` in the place of the settings' own there are no rates: a batch's requests were admitted with it."""
    app = FastAPI(title="Quire", version=__version__, redoc_url=None)
    routers = [router(service) for router in ROUTERS]
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    for router in (_literal_paths(routes), *routers):
        app.include_router(router)
    app.openapi = lambda: without_422(app)  # type: ignore[method-assign]
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, partial(_on_http, routes))
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(QuireError, _on_error)
    app.add_exception_handler(ClientGone, _on_gone)
    app.add_middleware(RequestMiddleware, service=service, keys=keys)
    if service.settings.allowed_origins:
        app.add_middleware(Origins, origins=service.settings.allowed_origins)
    return app


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply(request.scope, as_api_error(from_validation(error.errors(), error.body)))


def _allowed(routes: Iterable[APIRoute], path: str) -> set[str]:
    """The methods of a path; of one without parameters, if several match."""
    matching = [route for route in routes if route.path_regex.match(path)]
    literal = [route for route in matching if "{" not in route.path]
    return {method for route in literal or matching for method in route.methods or ()}


def _literal_paths(routes: Sequence[APIRoute]) -> APIRouter:
    """Refuses other methods of paths that a path with a parameter would take: /compact is no response's id."""
    router = APIRouter(include_in_schema=False)

    async def refuse() -> None:
        raise HTTPException(405)

    for path in {route.path for route in routes if "{" not in route.path}:
        taken = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        if others := taken - _allowed(routes, path):
            router.add_api_route(path, refuse, methods=sorted(others))
    return router


async def _on_http(routes: Sequence[APIRoute], request: Request, error: Exception) -> Response:
    """Errors of Starlette and FastAPI: no such path, a wrong method, an unreadable body."""
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, ApiError):  # raised while the body was read
        return error_reply(request.scope, cause)
    code, message, headers = None, str(error.detail), dict(error.headers or {})
    if isinstance(cause, UnicodeDecodeError):
        message = f"the body is no valid {cause.encoding} at byte {cause.start}: send UTF-8, uncompressed"
    elif isinstance(cause, RecursionError):
        message = "the body nests too deeply to be read: send fewer levels"
    if error.status_code == 404:
        code, message = "not_found", f"there is no {request.url.path} here: GET /docs shows what there is"
    elif error.status_code == 405:
        allowed = sorted(_allowed(routes, path_of(request.scope)))
        if allowed:  # else it is a path of the documents, and Starlette knows its methods
            headers["Allow"] = ", ".join(allowed)
        code = "method_not_allowed"
        message = f"{request.url.path} does not take {request.method}: use {headers.get('Allow', 'GET')}"
    shown = ApiError(error.status_code, message, code=code, headers=headers)
    return error_reply(request.scope, shown)


async def _on_error(request: Request, error: Exception) -> Response:
    shown = as_api_error(error)
    if shown.status == 500:
        log.error("%s", error, extra={"request_id": context_of(request).request_id})
    return error_reply(request.scope, shown)


async def _on_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


def without_422(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document promises 422 for bad bodies; here they are 400, in OpenAI's shape."""
    document = FastAPI.openapi(app)
    for path in document["paths"].values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
