"""ModelSet: several models behind one port, each a `quire serve` process of its own.

A model is started by its first request, and stopped when it was idle for its `keep_alive` or when another one needs its
memory: the least recently used first, pinned ones never, one that is answering only after its last answer. A process
gives all of its memory back.
"""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.config import Task
from quire.core.errors import ConfigError, EngineDead, InvalidRequest, NotFound, QuireError
from quire.link.http_client import HttpClient
from quire.observe.host import START_ON_STDIN, end_with_parent, numbers_in
from quire.observe.logs import get_logger
from quire.weights.architectures import task_of
from quire.weights.builtin import BUILTIN_MODEL, is_builtin_encoder

log = get_logger(__name__)
STARTED = re.compile(r"serving\s+(http://\S+?)/v1")
STOP_SECONDS = 30.0
LOOK_SECONDS = 0.5  # between two looks for idle models
LAST_LINES = 5  # of a process's log that an error shows
FRONT_VARIABLES = ("QUIRE_MODELS", "QUIRE_KEEP_ALIVE")  # flags of the front: not for the models' servers


class UnknownModel(NotFound):
    """A request names a model that this server does not have."""


class CannotStart(EngineDead):
    """The same request would fail again: its model does not fit, or its files are missing or damaged."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the file. `need`: bytes that it takes; None: what it took the last time, or an estimate."""

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of `quire serve`
    keep_alive: float = 300.0  # seconds; infinite: until its memory is needed
    pinned: bool = False  # started first and never stopped
    need: int | None = None


class ModelProcess:
    """One model's server. Used in one event loop."""

    def __init__(self, entry: ModelEntry) -> None:
        self.entry = entry
        self.client: HttpClient | None = None  # while it serves
        self.num_open = 0
        self.last_used = 0.0
        self.keep_alive = entry.keep_alive
        self.fault: str | None = None  # of the last start
        self.took: int | None = None  # bytes, when it was measured last
        self.start_seconds: float | None = None
        self.task = _known_task(entry.source)
        self.progress = ""  # the last line of its log while it starts
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[str] | None = None  # its address
        self._began = 0.0
        self._lines: list[str] = []

    @property
    def state(self) -> str:
        if self.client is not None:
            return "ready"
        return "starting" if self._process is not None else "failed" if self.fault else "stopped"

    async def launch(self, common: Sequence[str]) -> None:
        """Starts its process, which imports and then waits for `start`: it takes no memory for a model before."""
        self._began, entry = time.monotonic(), self.entry
        self.fault, self._lines = None, []
        source = [] if entry.source == BUILTIN_MODEL else [entry.source]
        command = [sys.executable, "-m", "quire", "serve", *source, "--host", "127.0.0.1", "--port", "0"]
        command += ["--served-model-name", entry.name, *entry.aliases, *common, *entry.flags]
        environment = {name: value for name, value in os.environ.items() if name not in FRONT_VARIABLES}
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stderr=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.PIPE,
            env=environment | {START_ON_STDIN: "1"},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(self._process, self._ready), name=f"log-{entry.name}")

    async def start(self) -> None:
        """Returns when it serves; CannotStart with the end of its log if it does not."""
        assert self._ready is not None
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # it ended already: its log says why
            self._process.stdin.write(b"\n")
        try:
            url = await self._ready
        except EngineDead:
            await self._bury()
            raise
        self.client = HttpClient(url)
        self.start_seconds = time.monotonic() - self._began
        self.last_used = time.monotonic()
        self.took = memory_of(self._process.pid)

    async def _read(self, process: asyncio.subprocess.Process, ready: "asyncio.Future[str]") -> None:
        """Its log goes to this process's, with the model's name; the end of the log is the end of the process."""
        assert process.stderr is not None
        async for raw in process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self._lines = [*self._lines[1 - LAST_LINES :], line]
            # without time and place
            self.progress = " ".join(re.split(" {2,}", line, maxsplit=2)[-1].split())
            started = STARTED.search(line)
            if started is None:  # its own address is of no use to others
                print(f"[{self.entry.name}] {line}", file=sys.stderr, flush=True)
            elif not ready.done():
                ready.set_result(started[1])
        code = await process.wait()
        why = next(
            (line for line in reversed(self._lines) if "error" in line.lower()), f"it ended with {code}"
        )
        if not ready.done():
            self.fault = why.partition("error:")[2].strip() or why
            ready.set_exception(CannotStart(f"{self.entry.name} cannot be started: {self.fault}"))
        elif self.client is not None:
            log.error("%s ended by itself (%s): its next request starts it again", self.entry.name, why)
            self.client, self._process = None, None

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to its whole group if that takes too long."""
        client, process = self.client, self._process
        self.client = None
        if self._ready is not None:
            self._ready.cancel()
        if client is not None:
            await client.close()
        if process is not None and process.returncode is None:
            self.took = memory_of(process.pid) or self.took
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        await self._bury()

    async def _bury(self) -> None:
        if self._reading is not None:
            with suppress(asyncio.CancelledError, EngineDead):
                await self._reading
        self._process = self._reading = self._ready = None


def memory_of(pid: int) -> int | None:
    """Bytes that a process and its children hold alone; None where /proc does not tell."""
    total, pids = 0, [pid]
    while pids:
        process = Path(f"/proc/{pids.pop()}")
        total += numbers_in(process / "smaps_rollup").get("Pss", 0) << 10
        with suppress(OSError, ValueError):
            pids += map(int, (process / "task" / process.name / "children").read_text().split())
    return total or None


@dataclass(slots=True)
class ModelSet:
    """Which models run. `memory`: bytes for all of them; `common`: flags of every server."""

    entries: Sequence[ModelEntry]
    memory: int
    max_running: int
    start_timeout: float = 300.0
    common: tuple[str, ...] = ()
    estimate: Callable[[ModelEntry], int] = lambda entry: 0
    models: dict[str, ModelProcess] = field(init=False)
    _names: dict[str, str] = field(init=False)  # aliases too
    _turn: asyncio.Lock = field(init=False)  # one start or stop at a time
    _starts: dict[str, "asyncio.Task[None]"] = field(init=False)
    _looking: "asyncio.Task[None] | None" = field(init=False)

    def __post_init__(self) -> None:
        self.models = {entry.name: ModelProcess(entry) for entry in self.entries}
        self._names = {name: entry.name for entry in self.entries for name in (entry.name, *entry.aliases)}
        self._turn, self._starts, self._looking = asyncio.Lock(), {}, None
        pinned = sum(self.need(entry) for entry in self.entries if entry.pinned)
        if pinned > self.memory:
            raise ConfigError(
                f"the pinned models need {pinned / 1e9:.1f} GB and {self.memory / 1e9:.1f} GB are allowed: pin fewer, "
                "or raise --models-memory"
            )

    def need(self, entry: ModelEntry) -> int:
        return entry.need or self.models[entry.name].took or self.estimate(entry)

    def named(self, name: str | None) -> ModelProcess:
        """The model of a request; the most recently used one, if it names none."""
        if name is None:
            return max(self.models.values(), key=lambda model: (model.last_used, model.entry.pinned))
        known = self._names.get(name) or self._names.get(name.removesuffix(":latest"))
        if known is None:
            raise UnknownModel(
                f"the model {name[:80]!r} does not exist: this server has {', '.join(self.models)}", "model"
            )
        return self.models[known]

    def running(self, name: str | None = None) -> ModelProcess | None:
        """The model of this name if it serves; without a name, the most recently used one that does."""
        among = self.models.values() if name is None else [self.named(name)]
        serving = [model for model in among if model.client is not None]
        return max(serving, key=lambda model: model.last_used, default=None)

    async def open(self) -> None:
        """Starts the pinned models, one after the other, and looks for idle ones from then on.

        One that cannot be started keeps its memory reserved; its next request tries again.
        """
        for model in self.models.values():
            if model.entry.pinned:
                try:
                    await self._started(model)
                except EngineDead as fault:
                    log.error("%s; the other models are served", fault)
        self._looking = asyncio.create_task(self._look(), name="idle-models")

    async def stop_idle(self) -> None:
        """Those without a request; pages that watch them get an error event."""
        await asyncio.gather(*(model.stop() for model in self.models.values() if not model.num_open))

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*(model.stop() for model in self.models.values()))

    async def acquire(self, model: ModelProcess) -> HttpClient:
        """A client of its server, started if need be. `release` must follow. EngineDead: not now."""
        model.num_open += 1
        try:
            async with asyncio.timeout(self.start_timeout):
                while model.client is None:
                    await self._started(model)
        except TimeoutError:
            model.num_open -= 1
            raise EngineDead(
                f"{model.entry.name} was not ready within {self.start_timeout:g} s ({model.progress or model.state}): "
                "try again"
            ) from None
        except BaseException:
            model.num_open -= 1
            raise
        model.last_used = time.monotonic()
        return model.client

    def release(self, model: ModelProcess, keep_alive: float | None = None) -> None:
        model.num_open -= 1
        model.last_used = time.monotonic()
        if keep_alive is not None:
            model.keep_alive = keep_alive

    async def unload(self, model: ModelProcess) -> None:
        """After its last answer."""
        if model.entry.pinned:
            raise InvalidRequest(f"{model.entry.name} is pinned: it stays", "model")
        while model.num_open:
            await asyncio.sleep(0.02)
        async with self._turn:
            await model.stop()

    async def _started(self, model: ModelProcess) -> None:
        """Concurrent requests wait for one start; one that leaves does not end it for the others."""
        name = model.entry.name
        if name not in self._starts:
            self._starts[name] = asyncio.create_task(self._start(model), name=f"start-{name}")
            self._starts[name].add_done_callback(lambda _: self._starts.pop(name, None))
        await asyncio.shield(self._starts[name])

    async def _start(self, model: ModelProcess) -> None:
        async with self._turn:
            if model.client is None:
                try:
                    need = await self._needed(model)
                    await model.launch(self.common)  # it imports while another one ends
                    await self._make_room(model, need)
                    await model.start()
                except CannotStart as fault:
                    model.fault = model.fault or str(fault)
                    raise

    async def _needed(self, model: ModelProcess) -> int:
        """Bytes that it needs. CannotStart where it could not start, whichever others were stopped."""
        entry = model.entry
        if is_missing(entry.source):
            raise CannotStart(
                f"{entry.name} cannot be started: {entry.source}: no such folder or file: put it back and ask again"
            )
        need = await asyncio.to_thread(self.need, entry)  # it may read files
        with suppress(QuireError, OSError):  # of which its start will tell
            model.task = await asyncio.to_thread(task_of, entry.source)
        pinned = [other for other in self.models.values() if other.entry.pinned and other is not model]
        held = sum(other.took or self.need(other.entry) for other in pinned)
        if pinned and (held + need > self.memory or len(pinned) >= self.max_running):
            raise CannotStart(
                f"{entry.name} needs {need / 1e9:.1f} GB beside the pinned "
                f"{', '.join(other.entry.name for other in pinned)} ({held / 1e9:.1f} of {self.memory / 1e9:.1f} GB, "
                f"{len(pinned)} of {self.max_running} models): raise --models-memory or --models-max, or pin fewer"
            )
        return need

    async def _make_room(self, model: ModelProcess, need: int) -> None:
        while True:
            running = [other for other in self.models.values() if other.client is not None]
            used = sum(other.took or self.need(other.entry) for other in running)
            if len(running) < self.max_running and (used + need <= self.memory or not running):
                return
            idle = [other for other in running if not other.num_open and not other.entry.pinned]
            if idle:
                oldest = min(idle, key=lambda other: other.last_used)
                log.info("%s makes room for %s", oldest.entry.name, model.entry.name)
                await oldest.stop()
            else:
                await asyncio.sleep(0.02)  # until one has answered

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for model in self.models.values():
                idle = model.client is not None and not model.num_open and not model.entry.pinned
                if idle and now - model.last_used >= model.keep_alive:
                    async with self._turn:
                        if not model.num_open:
                            log.info(
                                "%s was idle for %.0f s: it is stopped",
                                model.entry.name,
                                now - model.last_used,
                            )
                            await model.stop()

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "object": "model",
                "owned_by": "quire",
                "created": 0,
                "task": model.task,
                "aliases": list(model.entry.aliases),
                "state": model.state,
                "progress": model.progress if model.state == "starting" else "",
                "pinned": model.entry.pinned,
                "memory_bytes": model.took if model.client is not None else 0,
                "requests_open": model.num_open,
                "idle_seconds": round(time.monotonic() - model.last_used, 1) if model.client else None,
                "error": model.fault,
            }
            for name, model in self.models.items()
        ]


def is_missing(source: str) -> bool:
    """Whether it names a file or folder, and none is there. `read_models` makes paths absolute."""
    path = Path(source).expanduser()
    return (path.is_absolute() or path.suffix.lower() == ".gguf") and not path.exists()


def _known_task(source: str) -> Task | None:
    """None of a model of the hub: its files would be fetched for it."""
    if source == BUILTIN_MODEL:
        return "generate"
    return task_of(source) if is_builtin_encoder(source) or Path(source).expanduser().exists() else None


def _located(source: str) -> str:
    """A relative path that leads to a model now would later be taken for a hub's name, were the model gone."""
    path = Path(source).expanduser()
    return str(path.absolute()) if path.exists() or source.startswith((".", "~")) else source


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def keep_alive_seconds(value: Any) -> float | None:
    """Ollama's: seconds, or 5m; a negative number is for ever. None where it is nothing of the kind."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip())
    if match is None:
        return None
    seconds = float(match[1]) * _SECONDS[match[2]]
    return float("inf") if seconds < 0 else seconds


_FIELDS = {
    "model": str,
    "aliases": list,
    "settings": dict,
    "keep_alive": object,
    "pinned": bool,
    "memory": int,
}


def check_fields(where: str, given: Any, kinds: Mapping[str, type]) -> None:
    """ConfigError for what is no mapping, an unknown field, and a value of another type than the field's."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}: write fields and their values")
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"{where}: {name!r} is not a field: choose from {', '.join(sorted(kinds))}")
        if value is not None and not isinstance(value, kinds[name]):
            raise ConfigError(f"{where}: {name} is {value!r}: give {kinds[name].__name__}")


def read_models(document: Mapping[str, Any]) -> list[ModelEntry]:
    """From the `models` of a file: a name each, with its source and settings."""
    entries = []
    for name, given in document.items():
        fields: Any = {"model": given} if isinstance(given, str) else given or {}
        check_fields(f"models.{name}", fields, _FIELDS)
        keep_alive = keep_alive_seconds(fields.get("keep_alive", 300))
        if keep_alive is None:
            raise ConfigError(f"models.{name}: keep_alive is {fields['keep_alive']!r}: write seconds, or 5m")
        flags = [flag_words(key, value) for key, value in (fields.get("settings") or {}).items()]
        entries.append(
            ModelEntry(
                name=str(name),
                source=_located(str(fields.get("model", name))),
                aliases=tuple(map(str, fields.get("aliases") or ())),
                flags=tuple(word for flag in flags for word in flag),
                keep_alive=keep_alive,
                pinned=bool(fields.get("pinned")),
                need=fields.get("memory"),
            )
        )
    names = [name for entry in entries for name in (entry.name, *entry.aliases)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"the name {twice!r} is given to two models: rename one")
    return entries


def flag_words(name: str, value: Any) -> list[str]:
    """A setting as words of the command line."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, str(value)]
