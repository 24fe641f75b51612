"""`quire config show [COMMAND] [flags]`: the settings of a command, and where each value comes from."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from quire.bench.table import aligned
from quire.cli.main import command_parser
from quire.cli.parser import Parser, environment_name
from quire.core.errors import ConfigError

CONFIGURED = ("serve", "run", "chat", "generate", "ask", "run-batch", "finetune", "plan", "tune")


def add_arguments(parser: Parser) -> None:
    usage = (
        "show [--all] [--json] [COMMAND] [flags of it]: COMMAND is serve by default, --all shows defaults too"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="show …", help=usage)


def run(arguments: argparse.Namespace) -> int:
    wants_all, as_json = ("--all" in arguments.words, "--json" in arguments.words)
    words = [word for word in arguments.words if word not in ("--all", "--json")]
    if words[:1] != ["show"]:
        raise ConfigError(f"`quire config {' '.join(words[:1])}` is no command: write `quire config show`")
    command, flags = (words[1], words[2:]) if len(words) > 1 else ("serve", [])
    if command.startswith("-"):
        command, flags = "serve", words[1:]
    if command not in CONFIGURED:
        raise ConfigError(f"{command!r} has no settings to show: choose one of {', '.join(CONFIGURED)}")
    parser = command_parser(command)
    values = vars(parser.parse(flags))
    rows = [row for row in _rows(parser, values) if wants_all or row["origin"] != "default"]
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
    elif rows:
        print(
            aligned([["setting", "value", "from"], *([r["flag"], str(r["value"]), _where(r)] for r in rows)])
        )
    else:
        print(f"quire {command} would run with its defaults: --all shows them")
    return 0


def _rows(parser: Parser, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for flag, action in parser.flags():
        origin = parser.origins.get(action.dest, "default")
        value = values[action.dest]
        if "key" in action.dest and value:
            value = "…"  # keys are not printed
        yield {"flag": flag, "value": value, "origin": origin, "variable": environment_name(flag)}


def _where(row: dict[str, Any]) -> str:
    return f"default ({row['variable']})" if row["origin"] == "default" and row["variable"] else row["origin"]
