"""`quire rm MODEL`: removes a model from the cache."""

import argparse
import shutil
import sys
from pathlib import Path

from quire.bench.table import in_bytes
from quire.cli import background
from quire.cli.parser import Parser
from quire.core.errors import ConfigError
from quire.weights.builtin import BUILTIN, BUILTIN_MODEL
from quire.weights.cache import list_cached, size_of
from quire.weights.hub import hub_name, tagged_files


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a hub id, repo:QUANT for a GGUF file of it, or builtin"
    )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    name = background.server_name(arguments.model)
    if Path(name).is_absolute():
        raise ConfigError(f"{name} is not in the cache, it is your own file: delete it yourself")
    wanted = hub_name(name)
    for server in background.running():
        if server.model == name or (wanted.quant is None and hub_name(server.model).repo == name):
            raise ConfigError(
                f"a server runs {server.model} (pid {server.pid}): `quire stop {server.model}` first"
            )
    paths = _paths(name)
    num_bytes = sum(size_of(path) for path in paths)
    if not paths:
        raise ConfigError(f"{name} is not in the cache: `quire ls` lists what is")
    if not arguments.yes and not _agreed(f"remove {name} ({in_bytes(num_bytes)})? [y/N] "):
        print("nothing was removed")
        return 0
    for path in paths:
        _remove(path)
    print(f"removed {name} ({in_bytes(num_bytes)})")
    return 0


def _paths(name: str) -> list[Path]:
    """What is deleted: files, or the folder of a repository in the hub's cache."""
    if name == BUILTIN_MODEL:
        return [path for path in (BUILTIN.path, BUILTIN.marker) if path.exists()]
    wanted = hub_name(name)
    folders = [item.path for item in list_cached() if item.kind == "hub" and item.name == wanted.repo]
    if wanted.quant is None:
        return folders
    return [path for folder in folders for path in tagged_files(folder / "snapshots", wanted.quant)]


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("rm asks at a terminal only: give --yes")
    return input(question).strip().lower() in ("y", "yes")


def _remove(path: Path) -> None:
    """A folder with its content, or a file with the blob that it links to in the hub's cache."""
    if path.is_dir():
        shutil.rmtree(path)
        return
    blob = path.resolve()
    path.unlink()
    if blob.parent.name == "blobs":
        blob.unlink(missing_ok=True)
