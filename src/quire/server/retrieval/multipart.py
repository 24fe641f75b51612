"""Multipart bodies: the file goes to disk as it comes, other fields stay in memory; both have limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import Request

from quire.core.errors import InvalidRequest
from quire.rag.files import FileStore, checked_disk
from quire.server.errors import ApiError, ClientGone

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_HEADERS, MAX_HEADER_BYTES = 8, 4224  # of a part, and of one of them
MAX_OVERHEAD = 1 << 20  # bytes of a body beside the file
WRITTEN_AT_ONCE = 1 << 20


@dataclass(slots=True)
class SentForm:
    """A form as it was sent; its file lies under a temporary name."""

    path: Path
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: no file came
    num_bytes: int = 0


@asynccontextmanager
async def sent_form(request: Request, files: FileStore, name: str, limit: int) -> AsyncIterator[SentForm]:
    """The form of a request whose field `name` is a file of at most `limit` bytes. What was not moved is deleted."""
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header
    except ImportError:
        raise ApiError(
            501, "uploads need python-multipart: pip install 'quire[rag]'", code="unsupported"
        ) from None
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequest("send the file as multipart/form-data with a boundary, as clients do")
    length = request.headers.get("content-length", "")
    if length.isdigit():
        if int(length) > limit + MAX_OVERHEAD:
            raise too_large(limit)
        files.check_room(int(length))
    form = SentForm(files.temporary())
    try:
        with checked_disk(), form.path.open("wb") as file:
            reader = _FormReader(form, name, limit, file, parse_options_header)
            limits = {"max_header_count": MAX_HEADERS, "max_header_size": MAX_HEADER_BYTES}
            try:
                await reader.read(request, MultipartParser(options[b"boundary"], reader.callbacks, **limits))
            except FormParserError as error:
                raise InvalidRequest(f"the body is no valid multipart/form-data ({error})") from None
        if not reader.is_complete:
            raise InvalidRequest("the body ends within a part: send all of it")
        if form.filename is None:
            raise InvalidRequest(f"{name} is missing: send a file", name)
        yield form
    finally:
        form.path.unlink(missing_ok=True)


def too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the file is larger than {limit} bytes: send it in parts (/v1/uploads), or raise --max-file-bytes",
        param="file",
        code="file_too_large",
        headers={"Connection": "close"},
    )


class _FormReader:
    """Takes the parser's calls for one form."""

    def __init__(self, form: SentForm, name: str, limit: int, file: BinaryIO, parse_options: Any) -> None:
        self._form, self._name, self._limit, self._file = form, name, limit, file
        self._parse_options = parse_options
        self._header = (b"", b"")
        self._headers: dict[bytes, bytes] = {}
        self._part = ""  # the name of the part that is being read
        self._is_file = False
        self._value = b""
        self._waiting = bytearray()  # of the file, not written yet
        self._num_parts = 0
        self.is_complete = False
        self.callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    async def read(self, request: Request, parser: Any) -> None:
        """Written in a thread: a slow disk does not stop others' streams."""
        num_bytes, more = 0, True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece, more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(piece)
            if num_bytes > self._limit + MAX_OVERHEAD:
                raise too_large(self._limit)
            parser.write(piece)
            if len(self._waiting) >= WRITTEN_AT_ONCE:
                await self._write()
        await self._write()

    async def _write(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, bytearray()
            await asyncio.to_thread(self._file.write, data)

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields: send fewer")
        self._headers, self._header, self._value = {}, (b"", b""), b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], self._header[1])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = (b"", b"")

    def _headers_end(self) -> None:
        _, options = self._parse_options(self._headers.get(b"content-disposition", b""))
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._part == self._name
        if self._is_file:
            if self._form.filename is not None:
                raise InvalidRequest(f"{self._name} is sent twice: send one file", self._name)
            self._form.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._form.num_bytes += end - start
            if self._form.num_bytes > self._limit:
                raise too_large(self._limit)
            self._waiting += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._part[:80]} has more than {MAX_FIELD_BYTES} bytes", self._part[:80])

    def _end(self) -> None:
        if not self._is_file:
            self._form.fields[self._part[:80]] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.is_complete = True
