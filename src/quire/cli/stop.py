"""`quire stop [MODEL]`: stops servers that `quire run` started, after the answers under way."""

import argparse

from quire.cli import background
from quire.cli.parser import Parser
from quire.core.errors import ConfigError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as `quire ps` names it (default: all)")


def run(arguments: argparse.Namespace) -> int:
    servers = background.running()
    if arguments.model is not None:
        name = background.server_name(arguments.model)
        names = ", ".join(server.model for server in servers) or "none"
        servers = [server for server in servers if server.model == name]
        if not servers:
            raise ConfigError(f"no server of {name} runs here (running: {names}): see `quire ps`")
    for server in servers:
        background.stop(server)
        print(f"stopped {server.model} (pid {server.pid})")
    if not servers:
        print("no server runs")
    return 0
