"""The page at `/`: static files of the package. Its programs ask the API for everything that it shows.

/v1/laboratory: reports that `quire bench lab` wrote into its usual folder beside this server, for the page.
"""

import asyncio
import gzip
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire import __version__
from quire.core import laboratory
from quire.core.errors import NotFound
from quire.server.reply import JsonReply
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
REPORTS = "/v1/laboratory"
LAB_FOLDER = Path("quire-lab")  # the default of `quire bench lab --output-dir`
COMMAND = "quire bench lab NAME"
MAX_BYTES = 16 << 20  # of one file
_NAME = re.compile(r"[\w-]{1,100}\.(json|png)")


def page_router(service: Service) -> APIRouter:
    """Empty with --no-page."""
    router = APIRouter(include_in_schema=False)
    if not service.settings.page:
        return router

    @router.get("/page/{name}")
    async def page_file(name: str, request: Request) -> Response:
        return file_reply(service.settings, name, request)

    @router.get(REPORTS)
    async def reports() -> Response:
        return await laboratory_reply("")

    @router.get(f"{REPORTS}/{{name}}")
    async def report_file(name: str) -> Response:
        return await laboratory_reply(name)

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


# ---------------------------------------------------------------------- laboratory


def has_laboratory() -> bool:
    return LAB_FOLDER.is_dir() or laboratory.is_installed()


async def laboratory_reply(name: str) -> Response:
    """A report's record or one of its pictures; without a name the list of reports, the newest first."""
    if not name:
        command = COMMAND if laboratory.is_installed() else f"{laboratory.INSTALL} && {COMMAND}"
        reports = await asyncio.to_thread(_reports)
        return JsonReply({"folder": str(LAB_FOLDER), "command": command, "data": reports})
    data = await asyncio.to_thread(_content, name)
    kind = "image/png" if name.endswith(".png") else "application/json"
    return Response(data, media_type=kind, headers={"X-Content-Type-Options": "nosniff"})


def _content(name: str) -> bytes:
    path = LAB_FOLDER / name
    if _NAME.fullmatch(name) is None or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise NotFound.of("laboratory file", name[:100])
    return path.read_bytes()


def _reports() -> list[dict[str, Any]]:
    """A file that is no record of the laboratory, or is half written, is left out."""
    reports = []
    for path in LAB_FOLDER.glob("*.json"):
        try:
            record = json.loads(_content(path.name))
            kind, _, name = record["benchmark"].partition(" ")
            if kind == "lab":
                about = {"name": name, "date": record["date"], "take_away": record["results"]["take_away"]}
                reports.append({"file": path.name, **about})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, NotFound):
            continue
    return sorted(reports, key=lambda report: str(report["date"]), reverse=True)
