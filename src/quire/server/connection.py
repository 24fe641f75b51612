"""Limits on what a client sends. BoundedHttpProtocol: of headers and of time, before any key is checked. `limited`: of
a body's size, values and texts, before it is parsed."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from quire.server.errors import ApiError
from quire.server.settings import ServerSettings

KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections: who closes first must not be the server
LINGER_SECONDS = 2.0  # for a client that is still sending to read why it is refused
MAX_IGNORED_BYTES = 1 << 20  # that a refused client may go on sending meanwhile
MIN_BODY_BYTES = 16 << 10  # that must arrive in each body_timeout
MAX_BODY_TIMEOUTS = 10  # for a whole body


class _Stage(Enum):
    IDLE = 0  # between two requests, or while one is being answered
    HEAD = 1
    BODY = 2


class Http1Protocol(HttpToolsProtocol):
    """Answers clients that offer HTTP/2 (Java's, `curl --http2`) or a WebSocket in HTTP/1.1."""

    _num_parsed = 0  # bytes of the piece that is being parsed
    _head = b""  # of the request that offered an upgrade, without the offer

    def data_received(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._num_parsed = len(rest)
            super().data_received(rest)  # type: ignore[arg-type]  # any buffer is parsed
            rest = rest[self._num_parsed :]
            if self._head:
                head, self._head = self._head, b""
                super().data_received(head)

    def on_headers_complete(self) -> None:
        if not self._offers_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers_upgrade:
            super().on_message_complete()

    @property
    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """The parser takes what is behind the head for another protocol: a new one gets the head without the offer."""
        stop = sys.exception()
        if isinstance(stop, HttpParserUpgrade) and self._offers_upgrade:
            version = self.parser.get_http_version().encode()
            line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
            kept = [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser, self._num_parsed = HttpRequestParser(self), stop.args[0]
            self._head = b"\r\n".join([line, *kept, b"", b""])


class BoundedHttpProtocol(Http1Protocol):
    """uvicorn's protocol with limits: headers of `max_header_bytes` (431), complete within `header_timeout`, and a body
    that keeps arriving (408). A request that arrives in one piece costs no timer."""

    def __init__(self, settings: ServerSettings, **given: Any) -> None:
        super().__init__(**given)
        self._settings = settings
        self._stage = _Stage.IDLE
        self._num_bytes = 0  # of an incomplete head, or of a body since the last look
        self._num_looks = 0
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(KEEP_ALIVE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_bytes += len(data)
            if self._num_bytes > MAX_IGNORED_BYTES:
                self.transport.abort()
            return
        before = self._stage
        super().data_received(data)
        stage = self._stage
        if self._is_refused:
            return
        if stage is not before:
            self._num_bytes = self._num_looks = 0
            self._watch()
        if stage is _Stage.IDLE:
            self._disarm()
        elif stage is not before and before is _Stage.BODY:
            pass  # how much of the piece belongs to the next head is not known
        else:
            self._num_bytes += len(data)
            if stage is _Stage.HEAD and self._num_bytes > self._settings.max_header_bytes:
                self._refuse_head(self._num_bytes)

    # ------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self._stage = _Stage.HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stage = _Stage.BODY
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._settings.max_header_bytes:
            self._refuse_head(size)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stage = _Stage.IDLE
        if not self._is_refused:
            super().on_message_complete()

    # ------------------------------------------------------------------ time

    def _watch(self) -> None:
        if self._stage is _Stage.HEAD:
            self._arm(self._settings.header_timeout)
        elif self._stage is _Stage.BODY:
            self._arm(self._settings.body_timeout)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._stage is _Stage.IDLE:
            if self.cycle is None:  # it never asked for anything
                self.transport.close()
        elif self._stage is _Stage.HEAD:
            if self._is_answering:
                self._watch()
            else:
                self._refuse_time("the headers were not complete", "header", self._settings.header_timeout)
        elif self.flow.read_paused:
            self._watch()  # it is the server that does not read
        else:
            self._num_looks += 1
            if self._num_bytes < MIN_BODY_BYTES or self._num_looks >= MAX_BODY_TIMEOUTS:
                self._refuse_time("the body stopped arriving", "body", self._settings.body_timeout)
            else:
                self._num_bytes = 0
                self._watch()

    # ------------------------------------------------------------------ refusals

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_head(self, num_bytes: int) -> None:
        limit = self._settings.max_header_bytes
        remedy = "shorten them, or raise --max-header-bytes"
        message = f"the headers have {num_bytes} bytes or more and {limit} are allowed: {remedy}"
        self._refuse(ApiError(431, message, code="headers_too_large"), may_interrupt=False)

    def _refuse_time(self, what: str, name: str, seconds: float) -> None:
        message = f"{what} within {seconds:g} s: send the request faster, or raise --{name}-timeout"
        self._refuse(ApiError(408, message, code="request_timeout"), may_interrupt=name == "body")

    def _refuse(self, error: ApiError, may_interrupt: bool) -> None:
        """Answers, unless an answer has begun, and closes the connection once the client has had time to read it."""
        self._is_refused = True
        self._num_bytes = 0
        self._disarm()
        if self._is_answering and (self.cycle.response_started or not may_interrupt):
            self.transport.close()
            return
        body = json.dumps(error.body()).encode()
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + headers % len(body) + body)
        if self._is_answering:
            self.cycle.disconnected = True  # the application has nothing to add
            self.cycle.message_event.set()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


# ---------------------------------------------------------------------- bodies

SMALL_BODY = 1 << 20  # bytes; what it can hold is cheap
VALUE_BYTES = 8  # of the body's limit for each JSON value; lists and objects take more memory than numbers
LIST_WEIGHT, OBJECT_WEIGHT = 4, 8
_NUMBERS = b"0123456789+-.,[] \t\r\n"  # lists of token ids are no text, though as long


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The longest text that an endpoint can use, and the error for a longer one."""

    max_characters: int
    error: ApiError


class TextLengths:
    """Counts the characters between two quotes of a body, piece by piece: never more than there are."""

    def __init__(self) -> None:
        self._length = 0  # since the last quote
        self._escape = b""  # a backslash that ended the last piece

    def longest(self, piece: bytes) -> int:
        """Of the texts that this piece continues or ends; those within one piece do not matter."""
        piece, self._escape = self._escape + piece, b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._escape = piece[:-1], b"\\"
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        head, quote, _ = piece.partition(b'"')
        length = self._length + _least_characters(head)
        self._length = _least_characters(piece.rpartition(b'"')[2]) if quote else length
        return max(length, self._length)


def _least_characters(text: bytes) -> int:
    """An escape is one character: two bytes, or six; two of six may be one character."""
    num_escaped = text.count(b"\\") + 5 * text.count(b"\\u") if b"\\" in text else 0
    return len(text.translate(None, _NUMBERS).decode(errors="ignore")) - num_escaped


def limited(
    scope: Scope, receive: Receive, limit: int, text_limit: Callable[[], TextLimit | None]
) -> Receive:
    """Raises as soon as the body is known to be too large (413), to hold too many JSON values (413), or to hold a text
    that is too long for any request, however it is sent. The rest is then discarded and nothing is parsed.

    A list of eight-byte values may fill the body. Commas and braces within strings count too: a text has fewer.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(f"is larger than {limit} bytes: send less")
    seen, weight, lengths = 0, 0, TextLengths()

    async def counted() -> Message:
        nonlocal seen, weight
        message = await receive()
        piece = message.get("body", b"")
        seen += len(piece)
        if seen > limit:
            raise _too_large(f"is larger than {limit} bytes: send less")
        if seen > SMALL_BODY:
            weight += piece.count(b",") + LIST_WEIGHT * piece.count(b"[") + OBJECT_WEIGHT * piece.count(b"{")
            if weight > limit // VALUE_BYTES:
                raise _too_large(f"holds too many JSON values for {limit} bytes: send fewer lists or objects")
            texts = text_limit()
            if texts is not None and lengths.longest(piece) > texts.max_characters:
                raise texts.error
        return message

    return counted


def _too_large(problem: str) -> ApiError:
    message, headers = f"the body {problem}, or raise --max-body-bytes", {"Connection": "close"}
    return ApiError(413, message, code="body_too_large", headers=headers)
