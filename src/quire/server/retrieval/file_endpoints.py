"""FileEndpoints: what /v1/files and /v1/uploads do."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, BinaryIO, Protocol
from urllib.parse import quote

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.responses import Response, StreamingResponse

from quire.core.errors import InvalidRequest
from quire.rag.database import PageQuery
from quire.rag.files import StoredFile, StoredUpload
from quire.server.access import context_of
from quire.server.protocol.base import Deleted
from quire.server.protocol.retrieval import (
    MAX_FILE_SECONDS,
    MAX_PART_BYTES,
    MIN_FILE_SECONDS,
    PURPOSES,
    CompleteUpload,
    FileObject,
    NewUpload,
    UploadObject,
    UploadPartObject,
)
from quire.server.reply import JsonReply
from quire.server.retrieval.multipart import SentForm, sent_form
from quire.server.retrieval.retrieval import Retrieval
from quire.server.stored import list_page, page_limit

MAX_LISTED_FILES = 10_000
READ_AT_ONCE = 1 << 20
MAX_CURSOR = 128  # characters


def owner_of(request: Request) -> str:
    """The name of the request's key; empty where there are no keys."""
    return context_of(request).key or ""


def page_query(query: QueryParams, most: int = 100, default: int = 20, **names: str) -> PageQuery:
    """`names` has the API's own names of `after` and `before`, if they differ."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order={order[:40]!r} is not known: give 'asc' or 'desc'", "order")
    cursors = {field: query.get(names.get(field, field)) for field in ("after", "before")}
    for field, cursor in cursors.items():
        if cursor is not None and len(cursor) > MAX_CURSOR:
            raise InvalidRequest(f"{field}={cursor[:40]!r}… is no id", field)
    return PageQuery(page_limit(query.get("limit", str(default)), most), order, **cursors)


def in_thread(adds_files: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Response]]]:
    """For methods that read or write the disk: they run in a thread, and what they return is sent as JSON. The workers
    then look for new files if it `adds_files` to a store."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Awaitable[Response]]:
        async def endpoint(self: HasRetrieval, **given: Any) -> Response:
            shown = await self.retrieval.run(call, self, **given)
            if adds_files:
                self.retrieval.ingest.wake()
            return JsonReply(shown)

        return endpoint

    return decorate


class HasRetrieval(Protocol):
    retrieval: Retrieval


class FileEndpoints:
    def __init__(self, retrieval: Retrieval, max_file_bytes: int) -> None:
        self.retrieval = retrieval
        self._files = retrieval.files
        self._max_file_bytes = max_file_bytes

    async def create_file(self, request: Request) -> Response:
        async with sent_form(request, self._files, "file", self._max_file_bytes) as form:
            purpose, seconds = _purpose(form), _expires_seconds(form)
            add, name = self._files.add, form.filename or "file"
            file = await run_in_threadpool(add, owner_of(request), form.path, name, purpose, seconds)
        return JsonReply(shown_file(file))

    @in_thread()
    def list_files(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        asked = page_query(query, MAX_LISTED_FILES, MAX_LISTED_FILES)
        files, more = self._files.page(owner_of(request), asked, query.get("purpose"))
        return list_page([shown_file(file) for file in files], more)

    @in_thread()
    def retrieve_file(self, file_id: str, request: Request) -> FileObject:
        return shown_file(self._files.get(owner_of(request), file_id))

    async def retrieve_file_content(self, file_id: str, request: Request) -> Response:
        file = await self.retrieval.run(self._files.get, owner_of(request), file_id)
        opened = await run_in_threadpool(self._files.path(file.id).open, "rb")
        headers = {
            "Content-Length": str(file.bytes),
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(_pieces(opened), media_type="application/octet-stream", headers=headers)

    @in_thread()
    def delete_file(self, file_id: str, request: Request) -> Deleted:
        """From disk, and from all vector stores that have it."""
        owner = owner_of(request)
        self._files.get(owner, file_id)
        self.retrieval.stores.remove_everywhere(file_id)
        self._files.delete(owner, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    # ------------------------------------------------------------------ uploads

    @in_thread()
    def create_upload(self, body: NewUpload, request: Request) -> UploadObject:
        seconds = body.expires_after.seconds if body.expires_after is not None else None
        create = self._files.create_upload
        return _shown_upload(
            create(owner_of(request), body.filename, body.bytes, body.purpose, seconds), None
        )

    async def create_upload_part(self, upload_id: str, request: Request) -> Response:
        owner = owner_of(request)
        await self.retrieval.run(self._files.pending_upload, owner, upload_id)
        async with sent_form(request, self._files, "data", MAX_PART_BYTES) as form:
            part = await self.retrieval.run(self._files.add_part, owner, upload_id, form.path)
        shown: UploadPartObject = {
            "id": part.id,
            "object": "upload.part",
            "created_at": part.created_at,
            "upload_id": upload_id,
        }
        return JsonReply(shown)

    @in_thread()
    def complete_upload(self, upload_id: str, body: CompleteUpload, request: Request) -> UploadObject:
        owner = owner_of(request)
        upload, file = self._files.complete_upload(owner, upload_id, body.part_ids)
        if body.md5 is not None:
            with self._files.path(file.id).open("rb") as opened:
                digest = hashlib.file_digest(opened, "md5").hexdigest()
            if digest != body.md5.lower():
                self._files.delete(owner, file.id)
                raise InvalidRequest(
                    f"md5 is {body.md5[:64]!r} and the parts have {digest}: create another upload", "md5"
                )
        return _shown_upload(upload, file)

    @in_thread()
    def cancel_upload(self, upload_id: str, request: Request) -> UploadObject:
        return _shown_upload(self._files.cancel_upload(owner_of(request), upload_id), None)


def shown_file(file: StoredFile) -> FileObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _shown_upload(upload: StoredUpload, file: StoredFile | None) -> UploadObject:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": upload.created_at,
        "expires_at": upload.expires_at,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "file": None if file is None else shown_file(file),
    }


def _purpose(form: SentForm) -> str:
    purpose = form.fields.get("purpose")
    if purpose not in PURPOSES:
        given = "missing" if purpose is None else repr(purpose[:40])
        raise InvalidRequest(f"purpose is {given}: give one of {', '.join(PURPOSES)}", "purpose")
    return purpose


def _expires_seconds(form: SentForm) -> int | None:
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            f"expires_after[anchor]={str(anchor)[:40]!r}: give 'created_at'", "expires_after"
        )
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if not is_number or not MIN_FILE_SECONDS <= int(seconds or "") <= MAX_FILE_SECONDS:
        raise InvalidRequest(
            f"expires_after[seconds]={str(seconds)[:40]!r} is outside {MIN_FILE_SECONDS} to {MAX_FILE_SECONDS}",
            "expires_after",
        )
    return int(seconds or "")


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await run_in_threadpool(file.read, READ_AT_ONCE):
            yield piece
