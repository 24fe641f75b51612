"""`quire bench throughput|latency|startup|speculate|serve|…`: measurements, as a table or JSON."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from tqdm import tqdm

from quire.bench.drive import SAMPLINGS
from quire.bench.offline import LatencyPlan, ThroughputPlan, run_latency, run_throughput
from quire.bench.report import BenchReport, write_json
from quire.bench.serve import Outcome, Served, ServePlan, run_serve
from quire.bench.serve_report import (
    GOALS,
    METRICS,
    check_plotting,
    parse_goals,
    parse_metrics,
    parse_percentiles,
    plot_serve,
    serve_report,
)
from quire.bench.startup import StartupPlan, run_startup
from quire.bench.workload import DATASETS, DISTRIBUTIONS, Lengths, WorkloadPlan, fixed, from_csv, named
from quire.cli.flags import add_engine_flags, engine_settings
from quire.cli.parser import FlagGroup, Parser
from quire.cli.start import announce_compiling
from quire.core import laboratory
from quire.core.config import USUAL_BLOCK_SIZE, EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.engine.build import Built, build
from quire.llm.progress import load_progress

STARTUP_POOL_TOKENS = 2048
DEFAULT_INPUT, DEFAULT_OUTPUT = 128, 64
SERVE_DEFAULTS = WorkloadPlan()
_ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def add_arguments(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="|".join(_BENCHMARKS), required=True)
    for name, benchmark in _BENCHMARKS.items():
        if benchmark.add is None and not laboratory.is_installed():
            # No prefix is an option's: any arguments are taken, and `run` says how to install the laboratory.
            missing = kinds.add_parser(name, help=benchmark.help, add_help=False, prefix_chars="\0")
            missing.add_argument("arguments", nargs="*")
            continue
        kind = kinds.add_parser(name, help=benchmark.help, description=benchmark.help)
        add = benchmark.add or getattr(_laboratory(name), f"add_{name}")
        add(kind)
        if name == "lab":  # writes its records beside its pictures
            add_engine_flags(kind)
            continue
        kind.add_argument(
            *("--output-json", "--output", "--save-result"),
            metavar="FILE",
            help="also write date, machine, settings and results as JSON",
        )
        kind.add_argument("--json", action="store_true", help="print that JSON instead of the table")
        if name != "serve":  # its engine is another process
            # latency has a --batch-size of its own
            add_engine_flags(kind, without=("batch_size",) if name == "latency" else ())


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == "lab":
        return int(_laboratory("lab").lab(arguments))
    measure = _BENCHMARKS[arguments.kind].run or getattr(_laboratory(arguments.kind), arguments.kind)
    report: BenchReport = measure(arguments)
    if arguments.output_json is not None:
        write_json(report, arguments.output_json)
    print(report.as_json() if arguments.json else report.as_text())
    return 0


def _add_throughput(parser: Parser) -> None:
    parser.add_argument("--num-prompts", type=int, default=100, help="requests (default: 100)")
    lengths = parser.exclusive()
    lengths.add_argument(
        "--lengths", choices=sorted(DISTRIBUTIONS), help="sample lengths from a named distribution"
    )
    columns = "take lengths from a file with columns such as prompt_tokens, output_tokens"
    lengths.add_argument("--lengths-csv", metavar="FILE", help=columns)
    _add_lengths(parser)
    parser.add_argument("--no-warm-up", action="store_true", help="measure the first steps as well")
    _add_sampling(parser)


def _add_latency(parser: Parser) -> None:
    parser.add_argument(
        "--batch-size", type=int, default=1, dest="requests_at_once", help="requests at once (default: 1)"
    )
    _add_lengths(parser)
    parser.add_argument("--iterations", type=int, default=5, help="measured batches (default: 5)")
    parser.add_argument("--warm-up", type=int, default=1, help="batches before them (default: 1)")
    _add_sampling(parser)


def _add_startup(parser: Parser) -> None:
    parser.add_argument("--iterations", type=int, default=3, help="fresh processes (default: 3)")
    parser.add_argument("--num-tokens", type=int, default=64, help="tokens to generate (default: 64)")


def _add_lengths(parser: Parser) -> None:
    for name, default, what in (("input", DEFAULT_INPUT, "prompt"), ("output", DEFAULT_OUTPUT, "answer")):
        parser.add_argument(f"--{name}-len", type=int, help=f"tokens of every {what} (default: {default})")


def _add_sampling(parser: Parser) -> None:
    mixed = "mixed is half greedy, half temperature 0.8, top-p 0.95"
    parser.add_argument("--sampling", choices=SAMPLINGS, default="greedy", help=mixed)


def _throughput(arguments: argparse.Namespace) -> BenchReport:
    lengths, source = _lengths(arguments)
    seed = arguments.seed or 0
    plan = ThroughputPlan(lengths, source, arguments.sampling, seed, not arguments.no_warm_up)
    hidden = not sys.stderr.isatty()
    with (
        built_engine(arguments) as (config, built),
        tqdm(total=len(lengths), disable=hidden, unit="req", leave=False) as bar,
    ):
        return run_throughput(config, built, plan, lambda: bar.update(1) and None)


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
    with built_engine(arguments) as (config, built):
        return run_latency(config, built, plan)


def _startup(arguments: argparse.Namespace) -> BenchReport:
    settings = engine_settings(arguments)
    EngineConfig.of(**settings)  # a bad setting fails before any process starts
    if not {"num_blocks", "kv_cache_memory_bytes"} & set(settings):
        settings["num_blocks"] = STARTUP_POOL_TOKENS // settings.get("block_size", USUAL_BLOCK_SIZE)
    return run_startup(StartupPlan(settings, arguments.iterations, arguments.num_tokens))


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


@contextmanager
def built_engine(arguments: argparse.Namespace) -> Iterator[tuple[EngineConfig, Built]]:
    """The engine that the flags describe, closed at the end; its start report goes to stderr."""
    config = EngineConfig.of(**engine_settings(arguments))
    announce_compiling()
    with load_progress(sys.stderr.isatty()) as progress:
        built = build(config, progress)
    for line in built.report.lines():
        print(line, file=sys.stderr)
    with closing(built.engine):
        yield config, built


def _laboratory(kind: str) -> ModuleType:
    return laboratory.load(f"cli.{kind}", f"`quire bench {kind}`")


# ---------------------------------------------------------------------- load on a server


def _add_serve(parser: Parser) -> None:
    _add_server(parser.group("server"))
    _add_workload(parser.group("requests"))
    _add_arrivals(parser.group("arrivals"))
    group = parser.group("results")
    goals = f"count requests that meet these goals, of {', '.join(GOALS)}: --goodput ttft:200 tpot:50"
    group.add_argument("--goodput", nargs="+", default=(), metavar="GOAL:MS", help=goals)
    group.add_argument(
        "--percentiles",
        "--metric-percentiles",
        default="50,90,95,99",
        metavar="N,…",
        help="percentiles of every latency, beside mean and maximum (default: 50,90,95,99)",
    )
    group.add_argument(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="NAME,…",
        help=f"latencies to print for one rate (default: {','.join(METRICS)})",
    )
    group.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw streams over engine steps (.html or .svg), and print which step held the latest tokens up; a Quire "
        "server only",
    )
    group.add_argument("--admin-key", metavar="KEY", help="for --timeline (default: --api-key)")
    group.add_argument(
        "--save-detailed", action="store_true", help="add the times of every request to the JSON"
    )
    group.add_argument("--plot", metavar="PNG", help="write a plot (needs matplotlib)")


def _serve(arguments: argparse.Namespace) -> BenchReport:
    goals, percentiles = parse_goals(arguments.goodput), parse_percentiles(arguments.percentiles)
    metrics, plan = parse_metrics(arguments.percentile_metrics), _serve_plan(arguments)
    timeline = None
    if arguments.timeline is not None:
        timeline = laboratory.load("report.serve_timeline", "--timeline")
        timeline.check_timeline(arguments.timeline)
    if arguments.plot is not None:
        check_plotting(arguments.plot)
    served = _served(plan)
    report = serve_report(plan, served, percentiles, goals, arguments.save_detailed, metrics)
    if timeline is not None:
        report = timeline.with_timeline(report, served, arguments.timeline)
    if arguments.plot is not None:
        plot_serve(served, report.results["rounds"], arguments.plot)
    if not any(rate["num_complete"] for rate in report.results["rounds"]):
        raise QuireError("no request was answered:\n" + report.as_text())
    return report


def _served(plan: ServePlan) -> Served:
    """Runs the plan with a progress bar for each rate, which counts the failed requests."""
    with ExitStack() as stack:
        bar: Any = None
        num_failed = 0

        def begin(rate: float | None, count: int) -> None:
            nonlocal bar, num_failed
            stack.close()  # the bar of the rate before
            name = "trace" if rate is None else f"{rate:g}/s"
            shown = sys.stderr.isatty()
            bar = stack.enter_context(
                tqdm(total=count, desc=name, unit="req", disable=not shown, leave=False)
            )
            num_failed = 0

        def count(outcome: Outcome) -> None:
            nonlocal num_failed
            if outcome.error is not None:
                num_failed += 1
                bar.set_postfix_str(f"{num_failed} failed", refresh=False)
            bar.update(1)

        return asyncio.run(run_serve(plan, begin, count))


def _serve_plan(arguments: argparse.Namespace) -> ServePlan:
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {arguments.max_concurrency}: give at least 1")
    dataset = arguments.dataset or ("trace" if arguments.dataset_path else SERVE_DEFAULTS.dataset)
    return ServePlan(
        base_url=arguments.base_url.rstrip("/").removesuffix("/v1"),
        workload=WorkloadPlan(
            dataset=dataset,
            path=arguments.dataset_path,
            num_prompts=arguments.num_prompts,
            input_len=arguments.random_input_len,
            output_len=arguments.random_output_len,
            range_ratio=arguments.random_range_ratio,
            seed=arguments.seed,
        ),
        endpoint=_ENDPOINTS.get(arguments.endpoint, arguments.endpoint),
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY"),
        rates=_request_rates(arguments.request_rate, dataset),
        burstiness=arguments.burstiness,
        trace_speed=arguments.trace_speed,
        max_concurrency=arguments.max_concurrency,
        timeout=arguments.timeout,
        num_warm_ups=arguments.num_warmups,
        extra=_extra_body(arguments),
        with_steps=arguments.timeline is not None,
        admin_key=arguments.admin_key,
    )


def _request_rates(text: str | None, dataset: str) -> tuple[float | None, ...]:
    if text is None:
        return (None,) if dataset == "trace" else (float("inf"),)
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise ConfigError(f"--request-rate {text!r}: write requests per second, inf, or several: 1,2,4")
    return rates


def _extra_body(arguments: argparse.Namespace) -> dict[str, Any]:
    extra: dict[str, Any] = {"temperature": arguments.temperature}
    if not arguments.no_ignore_eos:
        extra["ignore_eos"] = True
    if arguments.extra_body is not None:
        try:
            given = json.loads(arguments.extra_body)
        except ValueError as error:
            raise ConfigError(f"--extra-body is no valid JSON ({error})") from error
        if not isinstance(given, dict):
            raise ConfigError("--extra-body must be a JSON object, such as '{\"top_p\": 0.9}'")
        extra |= given
    return extra


def _add_server(group: FlagGroup) -> None:
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="server (default: %(default)s)"
    )
    group.add_argument("--model", help="model to request (default: the server's first)")
    group.add_argument("--api-key", metavar="KEY", help="key of the server (also: OPENAI_API_KEY)")
    endpoints = f"{' or '.join(_ENDPOINTS.values())} (default: the former)"
    group.add_argument("--endpoint", default=_ENDPOINTS["completions"], metavar="PATH", help=endpoints)
    group.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds for one request (default: 3600)"
    )


def _add_workload(group: FlagGroup) -> None:
    datasets = "random: about --random-…-len; sharegpt, alpaca: lengths like theirs; trace: --dataset-path"
    group.add_argument("--dataset", choices=DATASETS, help=datasets)
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="lengths, and times for a trace, from CSV or JSON lines with columns such as prompt_tokens, "
        "output_tokens, timestamp; Azure's and Mooncake's are understood",
    )
    group.add_argument("--num-prompts", type=int, default=100, help="requests (default: 100)")
    for name, default in (("input", SERVE_DEFAULTS.input_len), ("output", SERVE_DEFAULTS.output_len)):
        group.add_argument(
            f"--random-{name}-len", type=int, default=default, help="mean tokens (default: %(default)s)"
        )
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="0.2: lengths ± 20 %% (default: 0)"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals (default: 0)")
    group.add_argument("--temperature", type=float, default=0.0, help="temperature of sampling (default: 0)")
    ended = "let answers end early (for servers that know no ignore_eos)"
    group.add_argument("--no-ignore-eos", action="store_true", help=ended)
    group.add_argument("--extra-body", metavar="JSON", help="additional fields of every request")
    group.add_argument("--num-warmups", type=int, default=1, help="short requests first (default: 1)")


def _add_arrivals(group: FlagGroup) -> None:
    rates = "per second; inf: all at once; several: one run each (default: inf, or the trace's own times)"
    group.add_argument("--request-rate", metavar="R,…", help=rates)
    group.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: even")
    group.add_argument("--max-concurrency", type=int, help="requests open at once (default: no limit)")
    group.add_argument(
        "--trace-speed", type=float, default=1.0, help="2: the trace twice as fast (default: 1)"
    )


class Benchmark(NamedTuple):
    """A kind of benchmark. One without functions is in the laboratory, in the module of its name."""

    help: str
    add: Callable[[Any], None] | None = None
    run: Callable[[argparse.Namespace], BenchReport] | None = None


_BENCHMARKS = {
    "throughput": Benchmark(
        "many requests at once: tokens and requests per second, scheduler time", _add_throughput, _throughput
    ),
    "latency": Benchmark("one batch repeatedly: time to first token and per token", _add_latency, _latency),
    "startup": Benchmark("fresh processes: time to first token, resident memory", _add_startup, _startup),
    "speculate": Benchmark(
        "plain and speculative decoding in turn: tokens per second, acceptance rate, equality of tokens"
    ),
    "serve": Benchmark(
        "load on any OpenAI-compatible server: latency, throughput and goodput at one rate or several",
        _add_serve,
        _serve,
    ),
    "sharing": Benchmark(
        "parallel sampling and beam search: blocks saved by sharing, tokens per second with and without"
    ),
    "fit": Benchmark("fit the simulator's cost model to steps measured here, or to a file of measured steps"),
    "lab": Benchmark("the laboratory: one experiment, or all of them in one HTML report"),
}
