"""`quire bench serve`: load on a server that is already running, ours or anyone's."""

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from tqdm import tqdm

from quire.bench.report import BenchReport
from quire.bench.serve import ServePlan, run_serve
from quire.bench.serve_call import Outcome
from quire.bench.serve_plot import check_plotting, plot_serve
from quire.bench.serve_report import GOALS, parse_goals, parse_percentiles, serve_report
from quire.bench.serve_workload import DATASETS, WorkloadPlan
from quire.cli.parser import Parser
from quire.core.errors import ConfigError, QuireError

DEFAULTS = WorkloadPlan()
_NAMED = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def add_serve(parser: Parser) -> None:
    _add_server(parser.add_argument_group("server"))
    _add_workload(parser.add_argument_group("requests"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=(),
        metavar="GOAL:MS",
        help=f"count requests that keep these, of {', '.join(GOALS)}: --goodput ttft:200 tpot:50",
    )
    group.add_argument("--percentiles", default="50,90,99", metavar="N,…", help="(default: 50,90,99)")
    group.add_argument("--save-detailed", action="store_true", help="every request's times in the JSON")
    group.add_argument("--plot", metavar="PNG", help="draw it (needs matplotlib)")


def serve(arguments: argparse.Namespace) -> BenchReport:
    goals, percentiles = parse_goals(arguments.goodput), parse_percentiles(arguments.percentiles)
    plan = _plan(arguments)
    if arguments.plot is not None:
        check_plotting(arguments.plot)
    with _Progress() as progress:
        served = asyncio.run(run_serve(plan, progress.begin, progress.count))
    report = serve_report(plan, served, percentiles, goals, arguments.save_detailed)
    if arguments.plot is not None:
        plot_serve(served, report.results["rounds"], arguments.plot)
    if not any(one["num_complete"] for one in report.results["rounds"]):
        raise QuireError("no request was answered:\n" + report.as_text())
    return report


def _plan(arguments: argparse.Namespace) -> ServePlan:
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {arguments.max_concurrency}: give at least 1")
    dataset = arguments.dataset or ("trace" if arguments.dataset_path else DEFAULTS.dataset)
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
        endpoint=_NAMED.get(arguments.endpoint, arguments.endpoint),
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY"),
        rates=_rates(arguments.request_rate, dataset),
        burstiness=arguments.burstiness,
        trace_speed=arguments.trace_speed,
        max_concurrency=arguments.max_concurrency,
        timeout=arguments.timeout,
        num_warm_ups=arguments.num_warmups,
        extra=_extra(arguments),
    )


def _rates(text: str | None, dataset: str) -> tuple[float | None, ...]:
    if text is None:
        return (None,) if dataset == "trace" else (float("inf"),)
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise ConfigError(f"--request-rate {text!r}: write requests per second, inf, or several: 1,2,4")
    return rates


def _extra(arguments: argparse.Namespace) -> dict[str, Any]:
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


def _add_server(group: Any) -> None:
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)"
    )
    group.add_argument("--model", help="the model to ask for (default: the server's first)")
    group.add_argument("--api-key", metavar="KEY", help="(also: OPENAI_API_KEY)")
    group.add_argument(
        "--endpoint",
        default=_NAMED["completions"],
        metavar="PATH",
        help=f"{' or '.join(_NAMED.values())} (default: the former)",
    )
    group.add_argument(
        "--timeout", type=float, default=3600.0, metavar="X", help="seconds for one request (default: 3600)"
    )


def _add_workload(group: Any) -> None:
    group.add_argument(
        "--dataset",
        choices=DATASETS,
        help="random: about --random-…-len; sharegpt, alpaca: lengths like theirs; trace: --dataset-path",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="lengths, and times for a trace, from CSV or JSON lines with columns such as prompt_tokens, "
        "output_tokens, timestamp; Azure's and Mooncake's are understood",
    )
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests (default: 100)")
    for name, default in (("input", DEFAULTS.input_len), ("output", DEFAULTS.output_len)):
        group.add_argument(
            f"--random-{name}-len",
            type=int,
            default=default,
            metavar="N",
            help="tokens (default: %(default)s)",
        )
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X", help="0.2: lengths ± 20 %% (default: 0)"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0)")
    group.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="let answers end early (for servers that know no ignore_eos)",
    )
    group.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    group.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="short requests before (default: 1)"
    )


def _add_arrivals(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        metavar="R,…",
        help="per second; inf: all at once; several: one run each (default: inf, or the trace's own times)",
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson; less: bursts; more: even"
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests open at once (default: no limit)"
    )
    group.add_argument(
        "--trace-speed", type=float, default=1.0, metavar="X", help="2: the trace twice as fast (default: 1)"
    )


class _Progress:
    """A bar for each rate, with what failed so far."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._num_failed = 0

    def begin(self, rate: float | None, count: int) -> None:
        self.close()
        self._num_failed = 0
        name = "trace" if rate is None else f"{rate:g}/s"
        self._bar = tqdm(total=count, desc=name, unit="req", disable=not sys.stderr.isatty(), leave=False)

    def count(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._num_failed += 1
            self._bar.set_postfix_str(f"{self._num_failed} failed", refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
