"""`quire bench throughput|latency|startup|speculate|serve|sharing|lab`: measures; a table on stdout, JSON if asked."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

from tqdm import tqdm

from quire.bench.drive import SAMPLINGS
from quire.bench.latency import LatencyPlan, run_latency
from quire.bench.lengths import DISTRIBUTIONS, Lengths, fixed, from_csv, named
from quire.bench.report import BenchReport, write_json
from quire.bench.speculate import WORKLOADS, SpeculatePlan, run_speculate
from quire.bench.startup import StartupPlan, run_startup
from quire.bench.throughput import ThroughputPlan, run_throughput
from quire.cli.bench_serve import add_serve, serve
from quire.cli.engine_flags import add_engine_flags, engine_settings
from quire.cli.parser import Parser
from quire.cli.start import announce_compiling
from quire.core import laboratory
from quire.core.config import EngineConfig, SpeculationConfig
from quire.core.errors import ConfigError
from quire.engine.build import Built, build
from quire.llm.progress import load_progress
from quire.text.template import load_template

HELP = {
    "throughput": "many requests at once: tokens and requests per second, the scheduler's own time",
    "latency": "one batch again and again: time to the first token and per token",
    "startup": "fresh processes: time to the first token, memory afterwards",
    "speculate": "plain decoding and speculation in turn: tokens per second, drafts accepted, the same tokens",
    "serve": "load on any OpenAI server: latencies, throughput, goodput at one rate or several",
    "fit": "measures this machine's steps, or reads another's, and fits the simulator's cost model to them",
    "sharing": "parallel sampling and beam search: blocks saved by sharing, tokens a second with and without",
    "lab": "the laboratory: one experiment, or all of them in one HTML report",
}
LABORATORY = ("sharing", "fit", "lab")
STARTUP_POOL_TOKENS = 2048
DEFAULT_INPUT, DEFAULT_OUTPUT = 128, 64


def add_arguments(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="|".join(_ADD), required=True)
    for name, add in _ADD.items():
        if name in LABORATORY and not laboratory.is_installed():
            # No prefix is an option's: any arguments are taken, and `run` says how to install the laboratory.
            missing = kinds.add_parser(name, help=HELP[name], add_help=False, prefix_chars="\0")
            missing.add_argument("arguments", nargs="*")
            continue
        one = kinds.add_parser(name, help=HELP[name], description=HELP[name])
        add(one)
        if name == "lab":  # writes its records beside its pictures
            add_engine_flags(one)
            continue
        one.add_argument(
            *("--output-json", "--output", "--save-result"),
            metavar="FILE",
            help="also write date, machine, settings and results",
        )
        one.add_argument("--json", action="store_true", help="print that JSON instead of the table")
        if name != "serve":  # its engine is somebody else's process
            add_engine_flags(one, without=("batch_size",) if name == "latency" else ())  # it has its own


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == "lab":
        return int(_laboratory("lab").lab(arguments))
    report = _RUN[arguments.kind](arguments)
    if arguments.output_json is not None:
        write_json(report, arguments.output_json)
    print(report.as_json() if arguments.json else report.as_text())
    return 0


def _add_throughput(parser: Parser) -> None:
    parser.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests (default: 100)")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths", choices=sorted(DISTRIBUTIONS), help="draw lengths from a named distribution"
    )
    lengths.add_argument(
        "--lengths-csv",
        metavar="FILE",
        help="take lengths from a file with columns such as prompt_tokens, output_tokens",
    )
    _add_lengths(parser)
    parser.add_argument("--no-warm-up", action="store_true", help="measure the first steps as well")
    _add_sampling(parser)


def _add_latency(parser: Parser) -> None:
    parser.add_argument(
        "--batch-size",
        type=int,
        default=1,
        dest="requests_at_once",
        metavar="N",
        help="requests at once (default: 1)",
    )
    _add_lengths(parser)
    parser.add_argument(
        "--iterations", type=int, default=5, metavar="N", help="measured batches (default: 5)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=1, metavar="N", help="batches before them (default: 1)"
    )
    _add_sampling(parser)


def _add_startup(parser: Parser) -> None:
    parser.add_argument("--iterations", type=int, default=3, metavar="N", help="fresh processes (default: 3)")
    parser.add_argument(
        "--num-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)"
    )


def _add_speculate(parser: Parser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measured rounds of each workload (default: 5)"
    )
    parser.add_argument(
        "--num-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="default: all")


def _add_lengths(parser: Parser) -> None:
    for name, default, what in (("input", DEFAULT_INPUT, "prompt"), ("output", DEFAULT_OUTPUT, "answer")):
        parser.add_argument(
            f"--{name}-len", type=int, metavar="N", help=f"tokens of every {what} (default: {default})"
        )


def _add_sampling(parser: Parser) -> None:
    parser.add_argument(
        "--sampling",
        choices=SAMPLINGS,
        default="greedy",
        help="mixed is half greedy, half temperature 0.8, top-p 0.95",
    )


def _throughput(arguments: argparse.Namespace) -> BenchReport:
    lengths, source = _lengths(arguments)
    seed = arguments.seed or 0
    plan = ThroughputPlan(lengths, source, arguments.sampling, seed, not arguments.no_warm_up)
    config, built = _built(arguments)
    try:
        with tqdm(total=len(lengths), disable=not sys.stderr.isatty(), unit="req", leave=False) as bar:
            return run_throughput(config, built, plan, lambda: bar.update(1) and None)
    finally:
        built.engine.close()


def _latency(arguments: argparse.Namespace) -> BenchReport:
    plan = LatencyPlan(
        batch_size=arguments.requests_at_once,
        input_len=_or(arguments.input_len, DEFAULT_INPUT),
        output_len=_or(arguments.output_len, DEFAULT_OUTPUT),
        iterations=arguments.iterations,
        warm_up=arguments.warm_up,
        sampling=arguments.sampling,
        seed=arguments.seed or 0,
    )
    fixed(plan.input_len, plan.output_len, 1)  # checked before anything is loaded
    config, built = _built(arguments)
    try:
        return run_latency(config, built, plan)
    finally:
        built.engine.close()


def _startup(arguments: argparse.Namespace) -> BenchReport:
    settings = engine_settings(arguments)
    EngineConfig.of(**settings)  # a bad setting is known before any process starts
    if not {"num_blocks", "kv_cache_memory_bytes"} & set(settings):
        settings["num_blocks"] = STARTUP_POOL_TOKENS // settings.get(
            "block_size", EngineConfig().memory.block_size
        )
    return run_startup(StartupPlan(settings, arguments.iterations, arguments.num_tokens))


def _speculate(arguments: argparse.Namespace) -> BenchReport:
    plan = SpeculatePlan(
        arguments.num_tokens, arguments.rounds, tuple(arguments.workloads), arguments.seed or 0
    )
    arguments.speculative_config = arguments.speculative_config or '{"method": "ngram"}'
    config, speculating = _built(arguments)
    plain = build(replace(config, speculation=SpeculationConfig()))
    drafts, chains = config.speculation.parsed, None
    if drafts is not None and drafts.tree_width > 1:
        settings = asdict(replace(drafts, tree_width=1))
        chains = build(replace(config, speculation=SpeculationConfig(json.dumps(settings))))
    try:
        return run_speculate(config, plain, speculating, load_template(plain.source), plan, chains)
    finally:
        for built in (plain, speculating, chains):
            if built is not None:
                built.engine.close()


def _lengths(arguments: argparse.Namespace) -> tuple[list[Lengths], str]:
    count, seed = arguments.num_prompts, arguments.seed or 0
    if count < 1:
        raise ConfigError(f"--num-prompts is {count}: give at least 1")
    drawn = arguments.lengths or arguments.lengths_csv
    if drawn and (arguments.input_len is not None or arguments.output_len is not None):
        raise ConfigError(
            "--input-len and --output-len fix the lengths that the other flag draws: give one kind"
        )
    if arguments.lengths:
        return named(arguments.lengths, count, seed), arguments.lengths
    if arguments.lengths_csv:
        return from_csv(arguments.lengths_csv, count, seed), arguments.lengths_csv
    input_len, output_len = _or(arguments.input_len, DEFAULT_INPUT), _or(arguments.output_len, DEFAULT_OUTPUT)
    return fixed(input_len, output_len, count), f"{input_len} in, {output_len} out"


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _built(arguments: argparse.Namespace) -> tuple[EngineConfig, Built]:
    config = EngineConfig.of(**engine_settings(arguments))
    announce_compiling()
    with load_progress(sys.stderr.isatty()) as progress:
        built = build(config, progress)
    for line in built.report.lines():
        print(line, file=sys.stderr)
    return config, built


def _laboratory(kind: str) -> ModuleType:
    return laboratory.load(f"cli.{kind}", f"`quire bench {kind}`")


_ADD: dict[str, Callable[[Any], None]] = {
    "throughput": _add_throughput,
    "latency": _add_latency,
    "startup": _add_startup,
    "speculate": _add_speculate,
    "serve": add_serve,
    "sharing": lambda parser: _laboratory("sharing").add_sharing(parser),
    "fit": lambda parser: _laboratory("fit").add_fit(parser),
    "lab": lambda parser: _laboratory("lab").add_lab(parser),
}
_RUN: dict[str, Callable[[argparse.Namespace], BenchReport]] = {
    "throughput": _throughput,
    "latency": _latency,
    "startup": _startup,
    "speculate": _speculate,
    "serve": serve,
    "sharing": lambda arguments: _laboratory("sharing").sharing(arguments),
    "fit": lambda arguments: _laboratory("fit").fit(arguments),
}
