"""`quire models`: lists the cached models with size and path."""

import argparse
import json
from dataclasses import asdict

from quire.bench.table import aligned, in_bytes
from quire.cli.parser import Parser
from quire.weights.builtin import BUILTIN, BUILTIN_NAME
from quire.weights.cache import CachedItem, cache_folder, list_cached

KINDS = {
    "model": "taken from a package",
    "converted": "converted for this engine",
    "offloaded": "layers that stream from disk",
    "hub": "from the hub",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    items = list_cached()
    if arguments.json:
        listing = {"cache": cache_folder(), "models": [asdict(item) for item in items]}
        print(json.dumps(listing, indent=2, default=str))
        return 0
    if items:
        header = ["name", "size", "what", "where"]
        rows = [
            [_name(item), in_bytes(item.num_bytes), KINDS.get(item.kind, item.kind), str(item.path)]
            for item in items
        ]
        print(aligned([header, *rows], right=(1,)))
        print(f"\n{in_bytes(sum(item.num_bytes for item in items))} in all; the cache is {cache_folder()}")
    else:
        print(f"nothing is cached in {cache_folder()}")
    if not any(item.path.name == BUILTIN.file_name for item in items):
        print(
            f"the built-in model, {BUILTIN_NAME}, is fetched ({in_bytes(BUILTIN.num_bytes)}) when it is first used"
        )
    return 0


def _name(item: CachedItem) -> str:
    return f"{BUILTIN_NAME} (built-in)" if item.path.name == BUILTIN.file_name else item.name
