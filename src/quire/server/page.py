"""The page at `/`: static files of the package. Its programs ask the API for everything that it shows."""

import gzip
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire import __version__
from quire.server.laboratory import has_laboratory
from quire.server.service import Service
from quire.server.settings import ServerSettings

FOLDER = "page_files"
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


def page_router(service: Service) -> APIRouter:
    """Empty with --no-page."""
    router = APIRouter(include_in_schema=False)
    if not service.settings.page:
        return router

    @router.get("/page/{name}")
    async def page_file(name: str, request: Request) -> Response:
        return file_reply(service.settings, name, request)

    return router


def wants_page(settings: ServerSettings, request: Request) -> bool:
    """Browsers ask for HTML at `/`; other clients get JSON there."""
    return settings.page and "text/html" in request.headers.get("accept", "")


def file_reply(settings: ServerSettings, name: str, request: Request) -> Response:
    """One file of the page, if the client does not have it already."""
    if name not in _names():
        raise HTTPException(404)
    views = ["files", "training"] * settings.keeps_files + ["laboratory"] * has_laboratory()
    data, packed, tag = _file(name, " ".join(views))
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        data, headers["Content-Encoding"] = packed, "gzip"
    kind = TYPES[name.rpartition(".")[2]]
    return Response(data, headers=headers, media_type=f"{kind}; charset=utf-8")


@cache
def _names() -> frozenset[str]:
    return frozenset(path.name for path in files(__package__).joinpath(FOLDER).iterdir())


@cache
def _file(name: str, views: str) -> tuple[bytes, bytes, str]:
    """The file, the same compressed, and its tag. `views`: of endpoints that not every server has."""
    data = files(__package__).joinpath(FOLDER, name).read_bytes()
    if name == "index.html":
        data = data.replace(b"{{version}}", __version__.encode()).replace(b"{{views}}", views.encode())
    return data, gzip.compress(data, mtime=0), f'"{hashlib.sha256(data).hexdigest()[:16]}"'
