"""`quire serve`: an OpenAI-compatible HTTP server in front of the engine."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

from quire.cli.flags import add_engine_flags, engine_settings, parse_gigabytes
from quire.cli.parser import Collect, FlagGroup, Parser, parse_bytes
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.observe import logs
from quire.observe.host import START_ON_STDIN
from quire.server.access import read_key_file
from quire.server.processes import serve_processes
from quire.server.retrieval import adapters_folder
from quire.server.run import serve
from quire.server.settings import ServerSettings
from quire.text.reasoning import REASONING_PARSERS
from quire.text.tool_formats import TOOL_PARSERS

DEFAULTS = ServerSettings()
# these load torch, which the HTTP process of a plain server does without
SEVERAL_MODELS, AUTO = "quire.cli.serve_models", "quire.cli.auto"
# the server bounds its queue itself, before the engine's, and has several names
_OWN_FLAGS = ("max_queue_requests", "max_queue_tokens", "served_model_name")


def add_arguments(parser: Parser) -> None:
    _add_network(parser.group("network"))
    _add_access(parser.group("access"))
    _add_limits(parser.group("limits"))
    templates = "accept chat templates in requests"
    parser.add_argument("--trust-request-chat-template", action="store_true", default=None, help=templates)
    _add_formats(parser.group("answers"))
    _add_names(parser.group("names"))
    _add_models(parser.group("several models"))
    _add_embeddings(parser.group("embeddings"))
    _add_files(parser.group("files and vector stores"))
    _add_replicas(parser.group("replicas"))
    group = parser.group("logs")
    group.add_argument("--log-requests", action="store_true", help="log one line for each request")
    group.add_argument("--log-format", choices=logs.FORMATS, help="text, or json: one object per line")
    group.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (default: info)")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry traces to this URL (needs the extra `otel`)",
    )
    choice = "choose quantization and max_model_len for this machine, and say why; flags that are given stay"
    parser.add_argument("--auto", action="store_true", help=choice)
    add_engine_flags(parser, without=_OWN_FLAGS)
    more = "more models behind the same port, each started by its first request"
    parser.add_argument("more_models", nargs="*", metavar="MODEL", help=more)
    parser.intermixed = True


def run(arguments: argparse.Namespace) -> int:
    _set_up_logs(arguments)
    if arguments.models is not None or arguments.more_models:
        return int(import_module(SEVERAL_MODELS).run(arguments, server_settings(arguments)))
    engine = engine_settings(arguments)
    for name in _OWN_FLAGS:
        engine.pop(name, None)
    if arguments.auto:
        engine = import_module(AUTO).chosen(engine)
    settings = server_settings(arguments)
    if settings.served_names:
        _check_names(settings.served_names, engine)
        engine["served_model_name"] = settings.served_names[0]
    if engine.get("enable_lora") and engine.get("lora_dir") is None and settings.keeps_files:
        engine["lora_dir"] = str(adapters_folder(settings.data_dir, engine.get("model")))
    config = EngineConfig.of(**{"itl_goal": "auto", **engine})
    if settings.isolate_keys and config.memory.pin_prefix:
        raise ConfigError(
            "--isolate-keys gives every key a cache of its own, where no pinned prefix is found: leave out one"
        )
    if os.environ.pop(START_ON_STDIN, None):
        sys.stdin.readline()
    if settings.api_server_count > 1:
        serve_processes(settings, config, show_progress=sys.stderr.isatty())
    else:
        serve(settings, config, show_progress=sys.stderr.isatty())
    return 0


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    given: dict[str, Any] = {}
    for field in fields(ServerSettings):
        value = getattr(arguments, field.name, None)
        if value is not None:
            given[field.name] = value
    given["api_keys"] = _api_keys(arguments)
    if arguments.keep_alive is not None:
        seconds = import_module(SEVERAL_MODELS).idle_seconds(arguments.keep_alive)
        given["keep_alive"] = None if math.isinf(seconds) else seconds
    given["admin_key"] = arguments.admin_key or os.environ.get("QUIRE_ADMIN_KEY") or None
    given["allowed_origins"] = tuple(arguments.allowed_origins or ())
    given["embedding_models"] = tuple(arguments.embedding_model or ())
    given["embeddings"] = not arguments.no_embeddings
    if given.get("api_server_count", 1) > 1:  # what one process keeps, another does not have
        given.setdefault("max_stored_responses", 0)
        given["embeddings"] = bool(given["embedding_models"])
    for name in ("served_names", "model_aliases"):
        given[name] = tuple(dict.fromkeys(getattr(arguments, name) or ()))
    return ServerSettings(**given)


def _check_names(names: tuple[str, ...], engine: dict[str, Any]) -> None:
    """--served-model-name takes all words that follow it: a MODEL behind the names would become one of them."""
    if engine.get("model") is None and len(names) > 1 and os.path.exists(names[-1]):
        raise ConfigError(
            f"--served-model-name took {names[-1]!r} for a name: write MODEL before it, or as --model MODEL"
        )


def _api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The keys of flags, file and environment together. An empty key is refused: it would leave the server open."""
    keys = [(key or "").strip() for key in arguments.api_key or ()]  # a config file may hold null
    if not all(keys):
        raise ConfigError("--api-key is empty: give a key, or leave it out to let anyone ask")
    if arguments.api_key_file is not None:
        keys += read_key_file(arguments.api_key_file)
    named = os.environ.get("QUIRE_API_KEY")
    from_environment = [key.strip() for key in (named or "").split(",") if key.strip()]
    if named is not None and not from_environment:
        raise ConfigError("QUIRE_API_KEY holds no key: give one, or unset it to let anyone ask")
    return tuple(dict.fromkeys(keys + from_environment))


def _add_models(group: FlagGroup) -> None:
    group.add_argument(
        "--models", metavar="FILE", help="YAML file of models, each started by its first request"
    )
    group.add_argument(
        "--models-memory", type=parse_gigabytes, metavar="GB", help="memory of all of them together"
    )
    group.add_argument("--models-max", type=int, metavar="N", help="models at a time (default: 16)")
    group.add_argument(
        "--keep-alive",
        help="idle time after which a model is stopped, such as 5m (default: 5m; -1: never); with one model the server "
        "ends (default: -1)",
    )


def _add_network(group: FlagGroup) -> None:
    group.add_argument("--host", help=f"address to listen on (default: {DEFAULTS.host}, this machine only)")
    group.add_argument("--port", type=int, help=f"port, 0 for any free one (default: {DEFAULTS.port})")
    count = "HTTP processes on the port, all with the one engine (default: 1; more keep nothing in memory)"
    group.add_argument("--api-server-count", type=int, metavar="N", help=count)
    group.add_argument("--root-path", metavar="PATH", help="path prefix that a proxy adds")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate, to serve HTTPS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key of the certificate")
    default = f"(default: {DEFAULTS.sse_keep_alive:g}; 0: never)"
    group.add_argument(
        "--sse-keep-alive", type=float, help=f"seconds of silence before a stream gets a comment {default}"
    )
    origins = "CORS: allow browsers from this origin, or * for all (repeatable)"
    group.add_argument(
        "--no-page", dest="page", action="store_false", default=None, help="no page for browsers at /"
    )
    group.add_argument("--allowed-origins", action=Collect, metavar="ORIGIN", help=origins)


def _add_access(group: FlagGroup) -> None:
    keys = "require one of these keys (repeatable; also: QUIRE_API_KEY)"
    group.add_argument("--api-key", action=Collect, metavar="KEY", help=keys)
    group.add_argument("--api-key-file", metavar="FILE", help="file of keys, one per line")
    group.add_argument(
        "--admin-key", metavar="KEY", help="key of the admin endpoints (also: QUIRE_ADMIN_KEY)"
    )
    group.add_argument(
        "--max-concurrent-per-key", type=int, help="requests of one key at a time (default: no limit)"
    )
    for what in ("requests", "tokens"):
        group.add_argument(
            f"--max-{what}-per-minute-per-key",
            type=int,
            help=f"{what} of one key per minute (default: no limit)",
        )
    group.add_argument(
        "--isolate-keys", action="store_true", default=None, help="keys do not share cached prefixes"
    )


def _add_formats(group: FlagGroup) -> None:
    known = {
        "--tool-call-parser": ("tool calls", TOOL_PARSERS),
        "--reasoning-parser": ("reasoning", REASONING_PARSERS),
    }
    for flag, (what, parsers) in known.items():
        text = f"format of {what}: {', '.join(parsers)} or none (default: detected from the chat template)"
        group.add_argument(flag, metavar="NAME", help=text)
    compatible = "always on; accepted for compatibility with vLLM"
    group.add_argument("--enable-auto-tool-choice", action="store_true", help=compatible)


def _add_names(group: FlagGroup) -> None:
    names = "names of the model in the API; answers report the first, /v1/models lists all"
    group.add_argument(
        "--served-model-name", dest="served_names", action=Collect, nargs="+", metavar="NAME", help=names
    )
    alias = "another name for the model, or for an embedding model or adapter; not listed (repeatable)"
    group.add_argument(
        "--model-alias", dest="model_aliases", action=Collect, metavar="NAME[=MODEL]", help=alias
    )
    every = "accept every name: an unknown one means the model, or the first embedding model"
    group.add_argument("--any-model-name", action="store_true", default=None, help=every)


def _add_replicas(group: FlagGroup) -> None:
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=int,
        help="engines that serve the model, each on its own GPU or with its share of the cores (default: 1)",
    )
    group.add_argument(
        "--data-parallel-backend",
        "-dpb",
        metavar="NAME",
        help="mp: on this machine; ray: on the machines of a Ray cluster (default: mp)",
    )
    group.add_argument("--ray-address", help="HOST:PORT of the Ray cluster (default: this machine's)")
    group.add_argument(
        "--data-parallel-rpc-port",
        type=int,
        metavar="PORT",
        help="with ray: port for the first engine's connection, the others' follow (default: any free ones)",
    )
    group.add_argument(
        "--roles",
        type=lambda text: tuple(text.split(",")),
        metavar="ROLE,…",
        help="role of each of them: prefill computes prompts, decode the answers, both does both",
    )
    group.add_argument(
        "--routing-policy",
        metavar="NAME",
        help="which of them gets a request: prefix-work, least-work, least-requests or round-robin "
        f"(default: {DEFAULTS.routing_policy})",
    )


def _add_embeddings(group: FlagGroup) -> None:
    group.add_argument(
        "--embedding-model",
        "--encoder-model",
        action=Collect,
        metavar="MODEL",
        help="also serve this embedding model, classifier or reranker: builtin, a folder or a hub id (repeatable; "
        "default: the built-in one, started by the first request for it)",
    )
    cut = "cut texts that are longer than the embedding model takes (default: refuse them)"
    group.add_argument("--embedding-truncate", action="store_true", default=None, help=cut)
    group.add_argument("--no-embeddings", action="store_true", help="no encoders beside a generating model")


def _add_files(group: FlagGroup) -> None:
    folder = "folder of files, vector stores and batches, or none (default: `data` in the cache folder)"
    group.add_argument("--data-dir", metavar="FOLDER", help=folder)
    share = f"share of the cores that a fine-tuning job may use (default: {DEFAULTS.train_share})"
    group.add_argument("--train-share", type=float, metavar="X", help=share)
    address = "keep the indexes of vector stores in a Qdrant server, qdrant://HOST:6333 (default: in the data folder)"
    group.add_argument("--vector-store", metavar="URL", help=address)
    size = "maximum size of an uploaded file (default: 512MiB)"
    group.add_argument("--max-file-bytes", type=parse_bytes, metavar="BYTES", help=size)


def _add_limits(group: FlagGroup) -> None:
    step = "seconds for one engine step; the engine is restarted after that"
    flags: dict[str, tuple[Callable[[str], Any], str]] = {
        "max_queue_requests": (int, f"requests that may wait (default: {DEFAULTS.max_queue_requests})"),
        "max_queue_tokens": (int, f"prompt tokens that may wait (default: {DEFAULTS.max_queue_tokens})"),
        "max_body_bytes": (parse_bytes, "maximum size of a request body (default: 16MiB)"),
        "header_timeout": (
            float,
            f"seconds for a request's headers to arrive (default: {DEFAULTS.header_timeout:g})",
        ),
        "body_timeout": (
            float,
            f"seconds in which a request's body must make progress (default: {DEFAULTS.body_timeout:g})",
        ),
        "request_timeout": (float, "seconds for one request (default: no limit)"),
        "engine_timeout": (float, f"{step} (default: {DEFAULTS.engine_timeout:g})"),
        "max_stored_responses": (
            int,
            "responses, chat completions (store: true) and conversations kept in memory "
            f"(default: {DEFAULTS.max_stored_responses})",
        ),
        "max_stored_responses_bytes": (parse_bytes, "their maximum size (default: 256MiB)"),
        "max_stored_responses_seconds": (float, "seconds for which unused ones are kept (default: 30 days)"),
        "shutdown_timeout": (
            float,
            f"seconds to finish running requests after SIGTERM (default: {DEFAULTS.shutdown_timeout:g})",
        ),
    }
    for name, (kind, text) in flags.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    group.add_argument(
        "--max-header-bytes",
        "--h11-max-incomplete-event-size",
        type=parse_bytes,
        help="maximum size of a request's headers (default: 64KiB)",
    )


def _set_up_logs(arguments: argparse.Namespace) -> None:
    """Through the environment: the engine's process writes lines too."""
    if arguments.log_format:
        os.environ["QUIRE_LOG_FORMAT"] = arguments.log_format
    if arguments.log_level:
        os.environ["QUIRE_LOG_LEVEL"] = arguments.log_level
    logs.configure()
