"""/v1/laboratory: reports that `quire bench lab` wrote into its usual folder beside this server, for the page."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from quire.core import laboratory
from quire.core.errors import NotFound
from quire.server.reply import JsonReply
from quire.server.service import Service

REPORTS = "/v1/laboratory"
FOLDER = Path("quire-lab")  # the default of `quire bench lab --output-dir`
COMMAND = "quire bench lab NAME"
MAX_BYTES = 16 << 20  # of one file
_NAME = re.compile(r"[\w-]{1,100}\.(json|png)")


def has_laboratory() -> bool:
    return FOLDER.is_dir() or laboratory.is_installed()


def laboratory_router(service: Service) -> APIRouter:
    """Empty with --no-page."""
    router = APIRouter(include_in_schema=False)
    if not service.settings.page:
        return router

    @router.get(REPORTS)
    async def reports() -> Response:
        return await laboratory_reply("")

    @router.get(f"{REPORTS}/{{name}}")
    async def report_file(name: str) -> Response:
        return await laboratory_reply(name)

    return router


async def laboratory_reply(name: str) -> Response:
    """A report's record or one of its pictures; without a name the list of reports, the newest first."""
    if not name:
        command = COMMAND if laboratory.is_installed() else f"{laboratory.INSTALL} && {COMMAND}"
        reports = await asyncio.to_thread(_reports)
        return JsonReply({"folder": str(FOLDER), "command": command, "data": reports})
    data = await asyncio.to_thread(_content, name)
    kind = "image/png" if name.endswith(".png") else "application/json"
    return Response(data, media_type=kind, headers={"X-Content-Type-Options": "nosniff"})


def _content(name: str) -> bytes:
    path = FOLDER / name
    if _NAME.fullmatch(name) is None or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise NotFound.of("laboratory file", name[:100])
    return path.read_bytes()


def _reports() -> list[dict[str, Any]]:
    """A file that is no record of the laboratory, or is half written, is left out."""
    reports = []
    for path in FOLDER.glob("*.json"):
        try:
            record = json.loads(_content(path.name))
            kind, _, name = record["benchmark"].partition(" ")
            if kind == "lab":
                about = {"name": name, "date": record["date"], "take_away": record["results"]["take_away"]}
                reports.append({"file": path.name, **about})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, NotFound):
            continue
    return sorted(reports, key=lambda report: str(report["date"]), reverse=True)
