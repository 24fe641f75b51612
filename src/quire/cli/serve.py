"""`quire serve`: an OpenAI-compatible HTTP server in front of the engine."""

import argparse
import os
import sys
from dataclasses import fields
from typing import Any

from quire.cli.engine_flags import add_engine_flags, engine_settings
from quire.cli.parser import Collect, Parser
from quire.cli.sizes import parse_bytes
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.observe import logs
from quire.server.access import read_key_file
from quire.server.run import serve
from quire.server.settings import ServerSettings
from quire.text.reasoning import REASONING_PARSERS
from quire.text.tools.registry import TOOL_PARSERS

DEFAULTS = ServerSettings()
_OWN_FLAGS = ("max_queue_requests", "max_queue_tokens")  # bounded here, before the engine


def add_arguments(parser: Parser) -> None:
    _add_network(parser.add_argument_group("network"))
    _add_access(parser.add_argument_group("access"))
    _add_limits(parser.add_argument_group("limits"))
    parser.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        default=None,
        help="let requests bring a chat template of their own",
    )
    _add_formats(parser.add_argument_group("answers"))
    _add_embeddings(parser.add_argument_group("embeddings"))
    group = parser.add_argument_group("logs")
    group.add_argument("--log-requests", action="store_true", help="one line for each request")
    group.add_argument("--log-format", choices=logs.FORMATS, help="text, or json: one object a line")
    group.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (default: info)")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry traces there (needs the extra `otel`)",
    )
    add_engine_flags(parser, without=_OWN_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    _set_up_logs(arguments)
    engine = engine_settings(arguments)
    for name in _OWN_FLAGS:
        engine.pop(name, None)
    settings, config = server_settings(arguments), EngineConfig.of(**engine)
    if settings.isolate_keys and config.memory.pin_prefix:
        raise ConfigError(
            "--isolate-keys gives every key a cache of its own, where no pinned prefix is found: leave out one"
        )
    serve(settings, config, show_progress=sys.stderr.isatty())
    return 0


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    given: dict[str, Any] = {}
    for field in fields(ServerSettings):
        value = getattr(arguments, field.name, None)
        if value is not None:
            given[field.name] = value
    given["api_keys"] = _api_keys(arguments)
    given["admin_key"] = arguments.admin_key or os.environ.get("QUIRE_ADMIN_KEY") or None
    given["allowed_origins"] = tuple(arguments.allowed_origins or ())
    given["embedding_models"] = tuple(arguments.embedding_model or ())
    given["embeddings"] = not arguments.no_embeddings
    if arguments.served_model_name:
        given["served_names"] = (arguments.served_model_name,)
    return ServerSettings(**given)


def _api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """From all three places together. A key that is empty is refused: it would leave the server open unseen."""
    keys = [(key or "").strip() for key in arguments.api_key or ()]  # a config file may hold null
    if not all(keys):
        raise ConfigError("--api-key is empty: give a key, or leave it out to let anyone ask")
    if arguments.api_key_file is not None:
        keys += read_key_file(arguments.api_key_file)
    named = os.environ.get("QUIRE_API_KEY")
    found = [key.strip() for key in (named or "").split(",") if key.strip()]
    if named is not None and not found:
        raise ConfigError("QUIRE_API_KEY holds no key: give one, or unset it to let anyone ask")
    return tuple(dict.fromkeys(keys + found))


def _add_network(group: Any) -> None:
    group.add_argument("--host", help=f"address to listen on (default: {DEFAULTS.host}, this machine only)")
    group.add_argument("--port", type=int, metavar="N", help=f"0: any free one (default: {DEFAULTS.port})")
    group.add_argument("--root-path", metavar="PATH", help="the prefix under which a proxy serves this")
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="and this key")
    group.add_argument(
        "--sse-keep-alive",
        type=float,
        metavar="X",
        help=f"seconds of silence before a stream gets a comment (default: {DEFAULTS.sse_keep_alive:g}; 0: never)",
    )
    group.add_argument(
        "--allowed-origins",
        action=Collect,
        metavar="ORIGIN",
        help="allow browsers from there (may be repeated; *)",
    )


def _add_access(group: Any) -> None:
    group.add_argument(
        "--api-key", action=Collect, metavar="KEY", help="ask for one of these keys (also: QUIRE_API_KEY)"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="keys, one a line")
    group.add_argument("--admin-key", metavar="KEY", help="allow operators' calls (also: QUIRE_ADMIN_KEY)")
    group.add_argument(
        "--max-concurrent-per-key",
        type=int,
        metavar="N",
        help="requests of one key at a time (default: no limit)",
    )
    for what in ("requests", "tokens"):
        group.add_argument(
            f"--max-{what}-per-minute-per-key",
            type=int,
            metavar="N",
            help=f"{what} of one key per minute (default: no limit)",
        )
    group.add_argument(
        "--isolate-keys", action="store_true", default=None, help="keys share no cached prefixes"
    )


def _add_formats(group: Any) -> None:
    by_template = "(default: as the chat template shows)"
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help=f"how calls of tools are written: {', '.join(TOOL_PARSERS)} or none {by_template}",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help=f"how thoughts are marked: {', '.join(REASONING_PARSERS)} or none {by_template}",
    )
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="on in any case; taken for vLLM's users"
    )


def _add_embeddings(group: Any) -> None:
    group.add_argument(
        "--embedding-model",
        action=Collect,
        metavar="MODEL",
        help="start this embedding model too: builtin, a folder or a hub id (may be repeated; default: the built-in "
        "one starts when a request names it)",
    )
    group.add_argument(
        "--no-embeddings", action="store_true", help="no /v1/embeddings beside a model that generates"
    )


def _add_limits(group: Any) -> None:
    requests, tokens = DEFAULTS.max_queue_requests, DEFAULTS.max_queue_tokens
    group.add_argument(
        "--max-queue-requests", type=int, metavar="N", help=f"requests that may wait (default: {requests})"
    )
    group.add_argument(
        "--max-queue-tokens", type=int, metavar="N", help=f"prompt tokens that may wait (default: {tokens})"
    )
    group.add_argument(
        "--max-body-bytes", type=parse_bytes, metavar="BYTES", help="size of a request (default: 16MiB)"
    )
    group.add_argument(
        "--request-timeout", type=float, metavar="X", help="seconds for one request (default: no limit)"
    )
    group.add_argument(
        "--engine-timeout",
        type=float,
        metavar="X",
        help=f"seconds for one step of the engine, which is replaced after them (default: {DEFAULTS.engine_timeout:g})",
    )
    group.add_argument(
        "--max-stored-responses",
        type=int,
        metavar="N",
        help=f"responses of /v1/responses kept in memory (default: {DEFAULTS.max_stored_responses})",
    )
    group.add_argument(
        "--max-stored-responses-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="and their size (default: 256MiB)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        metavar="X",
        help=f"seconds for requests under way after SIGTERM (default: {DEFAULTS.shutdown_timeout:g})",
    )


def _set_up_logs(arguments: argparse.Namespace) -> None:
    """Through the environment: the engine's process writes lines too."""
    if arguments.log_format:
        os.environ["QUIRE_LOG_FORMAT"] = arguments.log_format
    if arguments.log_level:
        os.environ["QUIRE_LOG_LEVEL"] = arguments.log_level
    logs.configure()
