"""Ingest: turns the files of vector stores into chunks with vectors, in the background.

The database says what is left to do, so a process that was killed goes on where it was: files that are not parsed,
chunks that have no vectors, files whose chunks all have them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from quire.core.errors import NotFound, QuireError
from quire.observe.logs import get_logger
from quire.rag.chunks import WaitingChunk, chunk_text, windows
from quire.rag.files import FileStore
from quire.rag.parse import ParseError, parse_file
from quire.rag.stores import StoreFile, VectorStores
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)
MAX_CHUNKS = 50_000  # of one file
NUM_PARSERS = 2  # files that are parsed at a time
CHUNKS_AT_ONCE = 32  # that are embedded in one request
MAX_REQUESTS = 3  # open at once: the encoder computes while texts of others are cut and their vectors stored
BUSY_SHARE = 0.1  # of the time that embedding, and each parser, may take while text is generated
BUSY_SECONDS = 1.0  # after the last generation
PAUSE_SECONDS = 0.2  # between two looks whether it goes on
MAX_PAUSE = 5.0  # a file that took long to parse does not hold up the next for minutes
RETRY_SECONDS = 2.0  # after an engine that is down
MAX_RETRIES = 30
SWEEP_SECONDS = 60.0  # between two looks for what has expired
WINDOW_TOKENS = 254  # that an encoder reads, without special tokens
T = TypeVar("T")


@dataclass(eq=False)
class PassageEncoder:
    """The model that makes a store's vectors."""

    name: str
    width: int
    max_tokens: int  # of a text, with special tokens
    tokenizer: Tokenizer

    async def embed(self, texts: Sequence[str]) -> list[bytes]:
        """One float32 vector for each text. Raises EncoderDown if it cannot now, QuireError if it never can."""
        raise NotImplementedError


class PassageEncoders(Protocol):
    """What the ingestion needs of a server."""

    async def encoder(self, name: str | None) -> PassageEncoder:
        """The encoder of that name, or the default one; raises QuireError that says why there is none."""
        ...

    @property
    def is_generating(self) -> bool:
        """Whether text is being generated, which goes before ingestion."""
        ...


class EncoderDown(QuireError):
    """The encoder cannot be used now; it may be later."""


class Ingest:
    """Runs while it is entered as a context. `wake` says that there is work."""

    def __init__(self, files: FileStore, stores: VectorStores, encoders: PassageEncoders) -> None:
        self._files = files
        self._stores = stores
        self._encoders = encoders
        self._has_work = asyncio.Event()
        self._has_chunks = asyncio.Event()
        self._taking = asyncio.Lock()
        self._embedding: set[int] = set()  # chunks in open requests
        self._generated_at = -BUSY_SECONDS
        self._threads = ThreadPoolExecutor(NUM_PARSERS + 2, thread_name_prefix="ingest")
        self._tasks: list[asyncio.Task[None]] = []
        self._parsing: dict[tuple[str, str], asyncio.Task[None]] = {}

    def start(self) -> None:
        self._has_work.set()
        self._has_chunks.set()
        embedders = [self._embed_all() for _ in range(MAX_REQUESTS)]
        for work in (self._parse_all(), self._sweep(), *embedders):
            self._tasks.append(asyncio.create_task(work, name="ingest"))

    def wake(self) -> None:
        self._has_work.set()

    async def close(self) -> None:
        for task in (*self._tasks, *self._parsing.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._parsing.values(), return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, True)

    async def _thread(self, call: Callable[..., Any], *values: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *values)

    # ------------------------------------------------------------------ parsing

    async def _parse_all(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            await self._careful(self._start_parsers)

    async def _start_parsers(self) -> None:
        room = NUM_PARSERS - len(self._parsing)
        if room <= 0:
            return
        for file in await self._thread(self._stores.unparsed, room, list(self._parsing)):
            key = (file.store_id, file.id)
            task = self._parsing[key] = asyncio.create_task(self._parse(file), name="parse")
            task.add_done_callback(partial(self._parsed, key))

    def _parsed(self, key: tuple[str, str], _task: "asyncio.Task[None]") -> None:
        self._parsing.pop(key, None)
        self._has_work.set()

    async def _parse(self, file: StoreFile) -> None:
        began = time.monotonic()
        try:
            store = await self._thread(self._stores.by_id, file.store_id)
            if store is None:
                return
            encoder = await _retried(partial(self._encoders.encoder, store.model))
            if store.model is None:
                await self._thread(self._stores.set_model, store.id, encoder.name, encoder.width)
            await self._thread(self._make_chunks, file, store.owner, encoder)
        except Exception as fault:
            reason = _reason(fault)
            await self._careful(lambda: self._thread(self._stores.fail_file, file, *reason))
        self._has_chunks.set()
        await self._pause(began)

    def _make_chunks(self, file: StoreFile, owner: str, encoder: PassageEncoder) -> None:
        stored = self._files.get(owner, file.id)
        text = parse_file(self._files.path(file.id), stored.filename)
        chunks = chunk_text(text, encoder.tokenizer, file.max_tokens, file.overlap)
        if not chunks:
            raise ParseError("invalid_file", "the file holds no text")
        if len(chunks) > MAX_CHUNKS:
            raise ParseError(
                "invalid_file", f"the file makes {len(chunks)} chunks, of at most {MAX_CHUNKS}: divide it"
            )
        self._stores.add_chunks(file, chunks)

    # ------------------------------------------------------------------ embedding

    async def _embed_all(self) -> None:
        while True:
            await self._has_chunks.wait()
            await self._careful(self._embed_next)

    async def _embed_next(self) -> None:
        """The next chunks without vectors. Beside generation one request is open at a time, with pauses in between."""
        async with self._taking:
            self._has_chunks.clear()
            chunks = await self._thread(self._stores.unembedded, CHUNKS_AT_ONCE, frozenset(self._embedding))
            if not chunks:
                await self._thread(self._stores.complete_files)  # whose chunks another process embedded
                return
            self._has_chunks.set()
            self._embedding.update(chunk.id for chunk in chunks)
            if is_busy := self._is_busy():
                began = time.monotonic()
                await self._embed(chunks)
                await self._pause(began)
        if not is_busy:
            await self._embed(chunks)

    async def _pause(self, began: float) -> None:
        """While text is generated: until the work since `began` has taken its share of the time."""
        until = time.monotonic() + min(MAX_PAUSE, (time.monotonic() - began) * (1 / BUSY_SHARE - 1))
        while self._is_busy() and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, PAUSE_SECONDS))

    def _is_busy(self) -> bool:
        """Whether text is generated, or was a moment ago: the next request of a conversation follows soon."""
        if self._encoders.is_generating:
            self._generated_at = time.monotonic()
        return time.monotonic() - self._generated_at < BUSY_SECONDS

    async def _embed(self, chunks: Sequence[WaitingChunk]) -> None:
        """Of one store, and completes their files if nothing is missing."""
        try:
            vectors = await self._vectors(chunks)
            await self._thread(self._stores.set_vectors, vectors)
        finally:
            self._embedding.difference_update(chunk.id for chunk in chunks)
        await self._thread(self._stores.complete_files)

    async def _vectors(self, chunks: Sequence[WaitingChunk]) -> dict[int, bytes]:
        """By chunk; windows of several are embedded once. A fault of the encoder fails their files."""
        store_id = chunks[0].store_id
        try:
            store = await self._thread(self._stores.by_id, store_id)
            name = store.model if store is not None else None
            encoder = await _retried(partial(self._encoders.encoder, name))
            most = min(WINDOW_TOKENS, encoder.max_tokens - 2)
            cut: list[list[str]] = await self._thread(
                lambda: [
                    [window for part in chunk.parts for window in windows(part, encoder.tokenizer, most)]
                    or [chunk.text]
                    for chunk in chunks
                ]
            )
            texts = list(dict.fromkeys(window for own in cut for window in own))
            vectors: list[bytes] = []
            for start in range(0, len(texts), 2 * CHUNKS_AT_ONCE):  # one chunk may have many windows
                part = texts[start : start + 2 * CHUNKS_AT_ONCE]
                vectors += await _retried(partial(encoder.embed, part))
        except QuireError as error:
            for file_id in {chunk.file_id for chunk in chunks}:
                await self._thread(self._fail, store_id, file_id, str(error))
            return {}
        known = dict(zip(texts, vectors, strict=True))
        return {
            chunk.id: b"".join(known[window] for window in own)
            for chunk, own in zip(chunks, cut, strict=True)
        }

    def _fail(self, store_id: str, file_id: str, message: str) -> None:
        store = self._stores.by_id(store_id)
        if store is not None:
            with suppress(NotFound):
                self._stores.fail_file(self._stores.file(store, file_id), "server_error", message)

    # ------------------------------------------------------------------ upkeep

    async def _sweep(self) -> None:
        await self._careful(lambda: self._thread(self._stores.check_indexes))
        while True:
            await self._careful(lambda: self._thread(self._drop_expired))
            await asyncio.sleep(SWEEP_SECONDS)

    def _drop_expired(self) -> None:
        for file in self._files.expired():
            self._stores.remove_everywhere(file.id)
            with suppress(NotFound):
                self._files.drop(file.id)
        self._files.drop_old_uploads()
        self._stores.drop_expired()

    async def _careful(self, work: Callable[[], Awaitable[None]]) -> None:
        """A fault of one round, such as a full disk, does not end the work: the next round tries again."""
        try:
            await work()
        except Exception as fault:
            log.error("ingest    %s: %s; trying again", type(fault).__name__, fault)
            await asyncio.sleep(RETRY_SECONDS)
            self._has_work.set()
            self._has_chunks.set()


async def _retried(call: Callable[[], Awaitable[T]]) -> T:
    """Waits for an engine that is being restarted, for a while."""
    for _ in range(MAX_RETRIES - 1):
        with suppress(EncoderDown):
            return await call()
        await asyncio.sleep(RETRY_SECONDS)
    return await call()


def _reason(fault: Exception) -> tuple[str, str]:
    """The code and the message of a file that cannot be embedded."""
    if isinstance(fault, ParseError):
        return fault.code, str(fault)
    if isinstance(fault, NotFound):
        return "invalid_file", "the file was deleted or has expired"
    if isinstance(fault, QuireError):
        return "server_error", str(fault)
    log.error("a file cannot be parsed", exc_info=fault)
    return "server_error", f"{type(fault).__name__}: {fault}"
