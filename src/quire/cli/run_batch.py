"""`quire run-batch -i IN.jsonl -o OUT.jsonl`: runs a file of requests in OpenAI's batch format."""

import argparse
import asyncio
import os
import sys
from typing import BinaryIO

from tqdm import tqdm

from quire.cli.flags import add_engine_flags, engine_settings
from quire.cli.parser import Parser
from quire.cli.terminal import dim
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.link.messages import Ready
from quire.llm.progress import load_progress
from quire.observe import logs
from quire.server.batch import BatchSummary, RowFile, count_lines, is_same_file, open_input, run_batch

NOTHING_RAN = 2
_NOT_HERE = ("max_queue_requests", "max_queue_tokens")  # --max-concurrency bounds the queue


def add_arguments(parser: Parser) -> None:
    files = {
        "input": "requests, one per line; - for standard input",
        "output": "results, one per line; - for standard output",
    }
    for name, text in files.items():
        parser.add_argument(f"-{name[0]}", f"--{name}-file", required=True, metavar="FILE", help=text)
    parser.add_argument(
        "--resume", action="store_true", help="keep finished rows of the output file, run the rest"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    parser.add_argument(
        "--max-concurrency", type=int, help="requests in flight at once (default: twice --max-num-seqs)"
    )
    parser.add_argument("--quiet", action="store_true", help="print only errors on stderr")
    add_engine_flags(parser, without=_NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {arguments.max_concurrency}: give at least 1")
    config = EngineConfig.of(**engine_settings(arguments))
    lines, total = open_input(arguments.input_file), count_lines(arguments.input_file)
    if is_same_file(arguments.input_file, arguments.output_file):
        raise ConfigError(
            f"-o {arguments.output_file}: is the input, which would be lost: choose another file"
        )
    rows = RowFile(arguments.output_file, resume=arguments.resume, overwrite=arguments.overwrite)
    try:
        done = _run(arguments, config, lines, rows, total)
    except (KeyboardInterrupt, OSError):
        if arguments.output_file != "-":
            print(f"quire: {arguments.output_file} holds what is done: --resume goes on", file=sys.stderr)
        raise
    finally:
        rows.close()
    if done.num_done == 0:
        raise ConfigError(f"-i {arguments.input_file}: holds no request")
    if not arguments.quiet:
        print(summary(done), file=sys.stderr)
    return 0 if done.num_answered or done.num_skipped else NOTHING_RAN


def _run(
    arguments: argparse.Namespace, config: EngineConfig, lines: BinaryIO, rows: RowFile, total: int | None
) -> BatchSummary:
    # Server logs are noise here. The engine process logs too, and inherits this.
    os.environ.setdefault("QUIRE_LOG_LEVEL", "warning")
    logs.configure()
    shown = not arguments.quiet and sys.stderr.isatty()

    def on_ready(ready: Ready) -> None:
        for line in () if arguments.quiet else ready.lines:
            print(dim(line, sys.stderr), file=sys.stderr)

    with (
        load_progress(shown) as progress,
        tqdm(total=total, unit="req", disable=not shown, leave=False) as bar,
    ):

        def on_row(done: BatchSummary) -> None:
            failed = done.refused.total() + done.num_malformed
            if failed:
                bar.set_postfix_str(f"{failed} failed", refresh=False)
            bar.update(done.num_done - bar.n)

        return asyncio.run(
            run_batch(
                config,
                lines,
                rows,
                arguments.max_concurrency,
                on_progress=progress,
                on_ready=on_ready,
                on_row=on_row,
            )
        )


def summary(done: BatchSummary) -> str:
    parts = [f"{done.num_answered:,} answered"]
    parts += [f"{count:,} refused ({kind})" for kind, count in done.refused.most_common()]
    if done.num_malformed:
        parts.append(f"{done.num_malformed:,} malformed")
    if done.num_skipped:
        parts.append(f"{done.num_skipped:,} done before")
    tokens = f"{done.num_prompt_tokens:,} tokens in, {done.num_output_tokens:,} out"
    return f"{', '.join(parts)}; {tokens}; {done.seconds:.1f} s"
