"""serve: the HTTP side's process, from binding the port to the last drained request."""

import asyncio
import faulthandler
import logging
import resource
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.llm.progress import load_progress
from quire.observe.heap import freeze_heap
from quire.observe.logs import ROOT, get_logger
from quire.server.app import create_app
from quire.server.connection import KEEP_ALIVE_SECONDS, BoundedHttpProtocol
from quire.server.errors import Unavailable
from quire.server.retrieval import check_folder
from quire.server.service import Service
from quire.server.settings import ServerSettings

log = get_logger(__name__)
LAST_BYTES_SECONDS = 5  # for answers, or their error events, to reach their clients
BACKLOG = 2048
IDLE_LOOK_SECONDS = 0.5
HANG_SECONDS = 10  # beyond all other limits at shutdown; then the process ends in any case


def serve(settings: ServerSettings, config: EngineConfig, show_progress: bool = False) -> None:
    """Serves until SIGTERM or SIGINT. Raises what makes serving impossible, before or while the engine starts."""
    check_folder(settings)
    listener = bind(settings)
    adopt_logs()
    allow_open_files()
    log.info("loading   %s", config.model.model or "the built-in model")
    try:
        with load_progress(show_progress) as progress:
            service = Service.of(config, settings, progress)
            server = DrainingServer(uvicorn_config(service), service)
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(_serve(server, service, listener))
    finally:
        faulthandler.cancel_dump_traceback_later()
        listener.close()


async def _serve(server: "DrainingServer", service: Service, listener: socket.socket) -> None:
    """HTTP answers from the first moment: /health says alive while a large model is still loading."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(service.start())
    ending: asyncio.Task[None] | None = None
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _restart_on_hangup(service)
            report_start(service)
            freeze_heap()
            report_serving(service.settings, listener)
            ending = asyncio.create_task(server.end_when_idle())
        await serving
    finally:
        server.should_exit = True
        starting.cancel()
        if ending is not None:
            ending.cancel()
        await asyncio.wait({serving})
        await service.close()


def _restart_on_hangup(service: Service) -> None:
    """SIGHUP restarts the replicas one after the other; without replicas it ends the process, as it always does."""
    replicas: Any = service.main
    if service.settings.has_replicas:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, replicas.roll)


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or SIGINT drains, the second aborts what is left at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """TLS says goodbye and waits for an answer, which idle clients never give: they are cut off instead."""
        for connection in list(self.server_state.connections) if self.config.is_ssl else ():
            cycle = getattr(connection, "cycle", None)
            if (cycle is None or cycle.response_complete) and connection.transport is not None:
                connection.transport.abort()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            # in C, so that a thread that never gives up the interpreter lock cannot prevent it
            limit = self._service.settings.shutdown_timeout + LAST_BYTES_SECONDS + HANG_SECONDS
            faulthandler.dump_traceback_later(limit, exit=True)
            self._loop.call_soon_threadsafe(self._begin, signal.Signals(sig).name)

    def drain(self, name: str, at_once: bool = False) -> None:
        """As the first signal does, and `at_once` as two of them, for the reason `name`."""
        self._num_signals += 2 if at_once else 1
        self._begin(name)

    async def end_when_idle(self) -> None:
        """With `keep_alive`: drains after that many seconds without a request."""
        self._service.metrics.last_used = time.monotonic()  # a start may take longer than that
        while (left := self._service.seconds_left) is None or left > 0:
            if left is None:
                return
            await asyncio.sleep(min(left, IDLE_LOOK_SECONDS))
        self.drain(f"no request for {self._service.settings.keep_alive:g} s (--keep-alive)")

    def _begin(self, name: str) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(name))

    async def _drain(self, name: str) -> None:
        service, timeout = self._service, self._service.settings.shutdown_timeout
        service.draining = True
        engines = service.models.engines
        for engine in engines:
            engine.let_end()  # a signal to the whole process group reaches the engine too: it ends once it is idle
        num_open = sum(engine.num_open for engine in engines)
        log.info("%s: no new requests; up to %g s for the %d under way", name, timeout, num_open)
        deadline = time.monotonic() + timeout
        while (
            any(engine.has_work for engine in engines)
            and time.monotonic() < deadline
            and self._num_signals < 2
        ):
            await asyncio.sleep(0.05)
        fault = Unavailable("the server shut down before the end: send the request again", "shutting_down")
        aborted = sum(engine.fail_open(fault) for engine in engines)
        if aborted:
            log.warning("%d requests were aborted", aborted)
        self.should_exit = True


def uvicorn_config(service: Service) -> uvicorn.Config:
    settings = service.settings
    return uvicorn.Config(
        create_app(service),
        http=partial(BoundedHttpProtocol, settings),  # type: ignore[arg-type]
        lifespan="off", log_config=None, access_log=False, server_header=False, ws="none",
        ssl_certfile=settings.ssl_certfile, ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=LAST_BYTES_SECONDS, timeout_keep_alive=KEEP_ALIVE_SECONDS, backlog=BACKLOG,
    )  # fmt: skip


def bind(settings: ServerSettings, shared: bool = False) -> socket.socket:
    """Before anything is loaded: a port that is taken should cost no model start. `shared`: several may bind it."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}): choose another --host or --port"
        ) from error
    return listener


def allow_open_files() -> None:
    """Each connection is a file: raises the limit on open files to the hard limit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may refuse "no limit"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def report_start(service: Service) -> None:
    """What the start decided, in the log."""
    settings = service.settings
    for model in service.models.started_first:
        for line in model.ready.lines:
            log.info("%s", line)
    if service.models.main.task == "generate":
        formats = service.model.prompts.formats
        log.info(
            "answers   %s; %s",
            _format_report("tool calls", formats.tools, settings.tool_call_parser),
            _format_report("reasoning", formats.reasoning, settings.reasoning_parser),
        )
    if service.models.main.prompts.tokenizer is None:
        log.warning(
            "tokenizer none: the model's folder has no tokenizer.json, vocab.json with merges.txt, or tokenizer.model. "
            "Only token ids can be sent; --tokenizer names a folder that has one"
        )
    if settings.has_replicas:
        log.info("replicas  %d, requests by %s", settings.data_parallel_size, settings.routing_policy)
    tokens = f" or {settings.max_queue_tokens:,} prompt tokens" if settings.max_queue_tokens else ""
    log.info("queue     %s requests%s, then 429", f"{settings.max_queue_requests:,}", tokens)
    log.info(
        "stored    %s responses, chat completions and conversations or %s MB in memory",
        f"{settings.max_stored_responses:,}",
        f"{settings.max_stored_responses_bytes / 1e6:,.0f}",
    )
    log.info("files     %s", service.retrieval.folder if settings.keeps_files else "off")
    log.info("keys      %s", _keys_report(settings))
    log.info("timeouts  %s", _timeouts_report(settings))
    if settings.otlp_traces_endpoint:
        log.info("traces    to %s", settings.otlp_traces_endpoint)


def report_serving(settings: ServerSettings, listener: socket.socket) -> None:
    """The line that others wait for: requests are answered from now on."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    shown = f"[{host}]" if ":" in host else host
    log.info("serving   %s://%s:%d%s/v1", scheme, shown, port, settings.root_path.rstrip("/"))


def _keys_report(settings: ServerSettings) -> str:
    if not settings.api_keys:
        return "none: anyone may ask"
    limits = {
        "at a time": settings.max_concurrent_per_key,
        "requests a minute": settings.max_requests_per_minute_per_key,
        "tokens a minute": settings.max_tokens_per_minute_per_key,
    }
    shown = [f"{limit:,} {what}" for what, limit in limits.items() if limit is not None]
    return f"{len(settings.api_keys)}, each {', '.join(shown) if shown else 'without limits'}"


def _timeouts_report(settings: ServerSettings) -> str:
    request = "none" if settings.request_timeout is None else f"{settings.request_timeout:g} s"
    return (
        f"{request} for a request, {settings.engine_timeout:g} s for a step of the engine, "
        f"{settings.shutdown_timeout:g} s for what is under way at the end"
    )


def _format_report(what: str, name: str | None, setting: str | None) -> str:
    return f"{what}: {name or 'none'} ({'as asked' if setting else 'by the chat template'})"


def adopt_logs() -> None:
    """Warnings of other libraries appear in our log format; the rest of their logs does not."""
    for name, level in (("uvicorn", logging.WARNING), ("opentelemetry", logging.ERROR)):
        theirs = logging.getLogger(name)
        theirs.handlers = logging.getLogger(ROOT).handlers
        theirs.propagate = False
        theirs.setLevel(level)
