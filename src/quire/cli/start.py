"""What commands share that load or describe a model: progress, the start report."""

import argparse
import sys
from pathlib import Path

from quire.cli.flags import engine_settings
from quire.cli.terminal import dim
from quire.core.config import EngineConfig
from quire.kernels import build as compilation
from quire.llm.llm import LLM
from quire.llm.progress import load_progress
from quire.weights.hub import hub_name
from quire.weights.source import Source, open_source


def start_llm(arguments: argparse.Namespace, *, quiet: bool = False) -> LLM:
    """The model that the flags name, loaded; the start report goes to stderr."""
    settings = engine_settings(arguments)
    if not quiet:
        announce_compiling()
    llm = LLM(settings.pop("model", None), use_tqdm=not quiet and sys.stderr.isatty(), **settings)
    if not quiet:
        for line in llm.report.lines():
            print(dim(line, sys.stderr), file=sys.stderr)
    return llm


def announce_compiling() -> None:
    compilation.announce(lambda line: print(line, file=sys.stderr, flush=True))


def described_source(config: EngineConfig) -> Source:
    """The model's own description: a folder needs config.json only, and with weights it tells how they are stored."""
    options = config.model
    given = options.model or ""
    is_gguf = given.lower().endswith(".gguf") or hub_name(given).quant is not None
    with_weights = not given or is_gguf or any(Path(given).glob("*.safetensors"))
    load_format = "auto" if with_weights else "dummy"
    with load_progress(sys.stderr.isatty()) as progress:
        return open_source(
            options.model, revision=options.revision, load_format=load_format, progress=progress
        )
