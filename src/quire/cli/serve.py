"""`quire serve`: an OpenAI-compatible HTTP server in front of the engine."""

import argparse
import math
import os
import sys
from dataclasses import fields
from importlib import import_module
from typing import Any

from quire.cli.flags import add_engine_flags, add_setting, engine_settings, parse_gigabytes
from quire.cli.parser import Collect, FlagGroup, Parser
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.observe import logs
from quire.observe.host import START_ON_STDIN
from quire.server.access import read_key_file
from quire.server.processes import serve_processes
from quire.server.retrieval import adapters_folder
from quire.server.run import serve
from quire.server.settings import PER_KEY, ServerSettings

# these load torch, which the HTTP process of a plain server does without
SEVERAL_MODELS, AUTO = "quire.cli.serve_models", "quire.cli.auto"
# the server bounds its queue itself, before the engine's, and has several names
_OWN_FLAGS = ("max_queue_requests", "max_queue_tokens", "served_model_name")


def add_arguments(parser: Parser) -> None:
    _add(
        parser.group("network"),
        *("host", "port", "api_server_count", "root_path", "ssl_certfile", "ssl_keyfile", "sse_keep_alive"),
        *("page", "allowed_origins"),
    )
    access = parser.group("access")
    keys = "require one of these keys (repeatable; also: QUIRE_API_KEY)"
    access.add_argument("--api-key", action=Collect, metavar="KEY", help=keys)
    access.add_argument("--api-key-file", metavar="FILE", help="file of keys, one per line")
    _add(access, "admin_key", *PER_KEY, "isolate_keys")
    _add(
        parser.group("limits"),
        *("max_queue_requests", "max_queue_tokens", "max_body_bytes", "header_timeout", "body_timeout"),
        *("request_timeout", "engine_timeout", "max_stored_responses", "max_stored_responses_bytes"),
        *("max_stored_responses_seconds", "shutdown_timeout", "max_header_bytes"),
    )
    _add(parser, "trust_request_chat_template")
    answers = parser.group("answers")
    _add(answers, "tool_call_parser", "reasoning_parser")
    compatible = "always on; accepted for compatibility with vLLM"
    answers.add_argument("--enable-auto-tool-choice", action="store_true", help=compatible)
    _add(parser.group("names"), "served_names", "model_aliases", "any_model_name")
    _add_models(parser.group("several models"))
    embeddings = parser.group("embeddings")
    _add(embeddings, "embedding_models", "embedding_truncate")
    alone = "no encoders beside a generating model"
    embeddings.add_argument("--no-embeddings", action="store_true", help=alone)
    files = parser.group("files and vector stores")
    _add(files, "data_dir", "train_share", "vector_store", "max_file_bytes")
    _add(
        parser.group("replicas"),
        *("data_parallel_size", "data_parallel_backend", "ray_address", "data_parallel_rpc_port", "roles"),
        "routing_policy",
    )
    group = parser.group("logs")
    _add(group, "log_requests", default=False)
    group.add_argument("--log-format", choices=logs.FORMATS, help="text, or json: one object per line")
    group.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (default: info)")
    _add(group, "otlp_traces_endpoint")
    choice = "choose quantization and max_model_len for this machine, with reasons; given flags are kept"
    parser.add_argument("--auto", action="store_true", help=choice)
    add_engine_flags(parser, without=_OWN_FLAGS)
    more = "more models behind the same port, each started by its first request"
    parser.add_argument("more_models", nargs="*", metavar="MODEL", help=more)
    parser.intermixed = True


def _add(group: FlagGroup | Parser, *names: str, **given: Any) -> None:
    """Flags of these fields of ServerSettings."""
    for name in names:
        add_setting(group, ServerSettings.__dataclass_fields__[name], **given)


def _add_models(group: FlagGroup) -> None:
    several = "YAML file of models, which are started by their first requests"
    group.add_argument("--models", metavar="FILE", help=several)
    memory = "memory of all running models (default: 80 %% of what is free)"
    group.add_argument("--models-memory", type=parse_gigabytes, metavar="GB", help=memory)
    group.add_argument("--models-max", type=int, metavar="N", help="models that run at once (default: 16)")
    group.add_argument(
        "--keep-alive",
        metavar="TIME",
        help="idle time before one of several models stops (default: 5m; -1: never), or the only one (default: -1)",
    )


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
    given["embeddings"] = not arguments.no_embeddings
    for name in ("allowed_origins", "embedding_models"):
        given[name] = tuple(getattr(arguments, name) or ())
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


def _set_up_logs(arguments: argparse.Namespace) -> None:
    """Through the environment: the engine's process writes lines too."""
    if arguments.log_format:
        os.environ["QUIRE_LOG_FORMAT"] = arguments.log_format
    if arguments.log_level:
        os.environ["QUIRE_LOG_LEVEL"] = arguments.log_level
    logs.configure()
