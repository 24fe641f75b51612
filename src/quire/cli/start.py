"""Starting a model for a command: progress while it loads, then what was decided."""

import argparse
import os
import sys
from contextlib import suppress
from typing import TextIO

from quire.cli.engine_flags import engine_settings
from quire.kernels import build as compilation
from quire.llm.llm import LLM


def start_llm(arguments: argparse.Namespace, *, quiet: bool = False) -> LLM:
    """The model that the flags name, ready; every figure that the engine decided goes to stderr."""
    settings = engine_settings(arguments)
    if not quiet:
        announce_compiling()
    llm = LLM(settings.pop("model", None), use_tqdm=not quiet and sys.stderr.isatty(), **settings)
    if not quiet:
        for line in llm.report.lines():
            print(dim(line, sys.stderr), file=sys.stderr)
    return llm


def announce_compiling() -> None:
    """The one start that takes a minute must not look like one that hangs."""
    with suppress(compilation.BuildError, OSError):  # without a compiler there is nothing to wait for
        if not compilation.library_path().exists():
            print("compiling kernels for this CPU, once: about a minute …", file=sys.stderr, flush=True)


def dim(text: str, stream: TextIO) -> str:
    """Text that stays in the background, where the terminal can show it so."""
    plain = not stream.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"
