"""`quire serve A B …` and `quire serve --models FILE`: several models behind one port, started on demand."""

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from quire.bench.capacity import Device, plan_capacity
from quire.cli.parser import read_config_file
from quire.cli.start import described_source
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.fleet.model_set import ModelEntry, ModelSet, check_fields, keep_alive_seconds, read_models
from quire.observe import logs
from quire.runner.sizing import available_memory
from quire.server.access import Origins
from quire.server.connection import Http1Protocol
from quire.server.models_app import ModelsApp
from quire.server.run import adopt_logs, bind, report_serving
from quire.server.settings import ServerSettings

MEMORY_SHARE = 0.8  # of what is free at the start, for all models together
MAX_RUNNING = 16
UNKNOWN_NEED = 2 << 30  # of a model that is not here yet
# Flags of the front, which the models' servers do not get. The value is how many words follow.
_OWN = {"--host": 1, "--port": 1, "--models": 1, "--models-memory": 1, "--models-max": 1, "--keep-alive": 1}
_FIELDS = {"memory": int, "max_running": int, "models": dict}


def run(arguments: argparse.Namespace, settings: ServerSettings) -> int:
    document = read_config_file(arguments.models, "--models") if arguments.models else {}
    check_fields(arguments.models, document, _FIELDS)
    if settings.ssl_certfile is not None:
        raise ConfigError("ssl_certfile: several models are served without TLS: leave that to a proxy")
    named = [name for name in (arguments.model_named, *arguments.more_models) if name is not None]
    given = {_short(name): {"model": name} for name in named}
    entries = read_models({**given, **(document.get("models") or {})})
    if not entries:
        raise ConfigError(f"{arguments.models} names no model under `models`: add one")
    if arguments.keep_alive is not None:
        seconds = idle_seconds(arguments.keep_alive)
        entries = [replace(entry, keep_alive=seconds) for entry in entries]
    memory = arguments.models_memory or document.get("memory") or MEMORY_SHARE * available_memory()
    most = arguments.models_max or document.get("max_running") or MAX_RUNNING
    if most < 1:
        raise ConfigError(f"--models-max is {most}: give 1 or more")
    if arguments.data_dir not in (None, "none"):
        raise ConfigError(
            f"--data-dir {arguments.data_dir} is for one server: give it to one model, as data-dir under its settings"
        )
    keeps_files = any("--data-dir" in entry.flags for entry in entries)
    settings = replace(settings, data_dir=settings.data_dir if keeps_files else "none")
    listener = bind(settings)
    adopt_logs()
    common = (*common_flags(arguments.given_words, named), "--data-dir", "none")
    models = ModelSet(entries, int(memory), most, common=common, estimate=estimated)
    try:
        asyncio.run(_serve(models, settings, listener))
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    return 0


def idle_seconds(text: str) -> float:
    seconds = keep_alive_seconds(text)
    if seconds is None:
        raise ConfigError(f"--keep-alive is {text!r}: write seconds, 5m or -1")
    return seconds


def _short(name: str) -> str:
    return Path(name).name if Path(name).exists() else name


def common_flags(words: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """The flags of the command line but the front's own and the models."""
    kept, skip = [], 0
    for word in words:
        if skip:
            skip -= 1
        elif word.partition("=")[0] in _OWN:
            skip = 0 if "=" in word else _OWN[word]
        elif word not in named:
            kept.append(word)
    return tuple(kept)


def estimated(entry: ModelEntry) -> int:
    """Bytes of the model's server by the plan; a guess where the model is not here."""
    try:
        config = EngineConfig.of(model=entry.source)
        device = Device("this machine", False, None, 0.0, 0.0, "")
        return plan_capacity(config, described_source(config), device).server_bytes
    except (QuireError, OSError):
        return UNKNOWN_NEED


class FrontServer(uvicorn.Server):
    """Ends pages that watch an idle model first: they would keep their connections open."""

    models: ModelSet

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.models.stop_idle()
        await super().shutdown(sockets)


async def _serve(models: ModelSet, settings: ServerSettings, listener: socket.socket) -> None:
    log = logs.get_logger(__name__)
    log.info("models    %s", ", ".join(f"{e.name}{' (pinned)' if e.pinned else ''}" for e in models.entries))
    log.info("memory    %.1f GB for all of them, %d at a time", models.memory / 1e9, models.max_running)
    app: ASGIApp = ModelsApp(models, settings)
    if settings.allowed_origins:
        app = Origins(app, settings.allowed_origins)
    config = uvicorn.Config(
        app, http=Http1Protocol,
        lifespan="off", log_config=None, access_log=False, server_header=False, date_header=False, ws="none",
        timeout_graceful_shutdown=max(1, int(settings.shutdown_timeout)),
    )  # fmt: skip
    server = FrontServer(config)
    server.models = models
    try:
        await models.open()
        report_serving(settings, listener)
        sys.stderr.flush()
        await server.serve(sockets=[listener])
    finally:
        await models.close()
