"""`quire ps`: the servers that `quire run` started and that still run."""

import argparse
import json
import time
from dataclasses import asdict

from quire.bench.table import aligned, in_bytes
from quire.cli.background import BackgroundServer, running
from quire.cli.parser import Parser
from quire.fleet.model_set import memory_of


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    servers = [(server, memory_of(server.pid), *_state(server)) for server in running()]
    if arguments.json:
        listing = [
            {**asdict(server), "memory": memory, "state": state, "seconds_left": left}
            for server, memory, state, left in servers
        ]
        print(json.dumps({"servers": listing}, indent=2))
    elif servers:
        rows = [
            [
                server.model,
                server.url,
                str(server.pid),
                in_bytes(memory) if memory else "unknown",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(server.since)),
                state,
                "never" if left is None else f"in {left // 60}:{left % 60:02} min",
            ]
            for server, memory, state, left in servers
        ]
        print(aligned([["model", "url", "pid", "memory", "since", "state", "stops"], *rows], right=(2, 3)))
    else:
        print("no server runs; `quire run MODEL` starts one")
    return 0


def _state(server: BackgroundServer) -> tuple[str, int | None]:
    """And the seconds until it stops without another request; None: it does not stop by itself."""
    health = server.health()
    return ("does not answer", None) if health is None else ("healthy", health.get("seconds_left"))
