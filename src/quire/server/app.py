"""create_app: endpoints, error shapes and middleware, put together."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from quire import __version__
from quire.core.errors import QuireError
from quire.observe.logs import get_logger
from quire.server.adapters import adapters_router
from quire.server.admin import admin_router
from quire.server.caller import caller_of
from quire.server.chat import chat_router
from quire.server.completions import completions_router
from quire.server.dialects import error_reply_for
from quire.server.documents import without_422
from quire.server.embeddings import embeddings_router
from quire.server.errors import ApiError, ClientGone, as_api_error, from_validation
from quire.server.health import health_router
from quire.server.keys import Keys
from quire.server.messages.router import messages_router
from quire.server.middleware import RequestMiddleware
from quire.server.models import models_router
from quire.server.rates import RATE_HEADERS, Rates
from quire.server.responses.router import responses_router
from quire.server.service import Service
from quire.server.tokens import tokens_router

log = get_logger(__name__)
ROUTERS = (
    chat_router,
    completions_router,
    responses_router,
    messages_router,
    embeddings_router,
    models_router,
    tokens_router,
    health_router,
    admin_router,
    adapters_router,
)


def create_app(service: Service) -> FastAPI:
    settings = service.settings
    app = FastAPI(title="Quire", version=__version__, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router(service))
    app.openapi = lambda: without_422(app)  # type: ignore[method-assign]
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(QuireError, _on_error)
    app.add_exception_handler(ClientGone, _on_gone)
    app.add_middleware(
        RequestMiddleware,
        keys=Keys(settings.api_keys, settings.max_concurrent_per_key),
        admin=Keys([settings.admin_key] if settings.admin_key else []),
        rates=Rates(settings.max_requests_per_minute_per_key, settings.max_tokens_per_minute_per_key),
        metrics=service.metrics,
        traces=service.traces,
        max_body_bytes=settings.max_body_bytes,
        log_requests=settings.log_requests,
        keep_alive=settings.sse_keep_alive,
        root_path=settings.root_path,
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
        )
    return app


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply_for(request.scope, from_validation(error.errors(), error.body))


async def _on_http(request: Request, error: Exception) -> Response:
    """What Starlette and FastAPI raise themselves: no such path, a wrong method, an unreadable body."""
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, ApiError):  # raised while the body was read
        return error_reply_for(request.scope, cause)
    code, said = None, str(error.detail)
    if error.status_code == 404:
        code, said = "not_found", f"there is no {request.url.path} here: GET /docs shows what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        code, said = "method_not_allowed", f"{request.url.path} does not take {request.method}: use {allowed}"
    found = ApiError(error.status_code, said, code=code, headers=error.headers)
    return error_reply_for(request.scope, found)


async def _on_error(request: Request, error: Exception) -> Response:
    found = as_api_error(error)
    if found.status == 500:
        log.error("%s", error, extra={"request_id": caller_of(request).request_id})
    return error_reply_for(request.scope, found)


async def _on_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)
