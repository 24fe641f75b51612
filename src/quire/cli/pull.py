"""`quire pull MODEL`: fetches a model, so that it starts without the network."""

import argparse
import sys

from quire.bench.table import in_bytes
from quire.cli.parser import Parser
from quire.llm.progress import load_progress
from quire.weights.source import Source, open_source


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a hub id, repo:QUANT for a GGUF file there, or builtin"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")


def run(arguments: argparse.Namespace) -> int:
    source = fetch(arguments.model, arguments.revision)
    print(f"{source.name}: {in_bytes(source.num_bytes)} in {source.num_tensors} tensors")
    return 0


def fetch(model: str, revision: str | None = None) -> Source:
    """The model with all its files, fetched where they are missing and checked."""
    with load_progress(sys.stderr.isatty()) as progress:
        return open_source(model, revision=revision, progress=progress)
