"""The report of `bench serve`: latency percentiles, throughput, goodput, failures by kind, and a plot."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.report import BenchReport, percentile
from quire.bench.serve import Outcome, Round, Served, ServePlan
from quire.bench.table import aligned
from quire.core.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")
METRICS = {  # vLLM's names, those of the record, and those of the table
    "ttft": ("ttft_ms", "first token (TTFT)"),
    "tpot": ("tpot_ms", "per token (TPOT)"),
    "itl": ("itl_ms", "between tokens (ITL)"),
    "e2el": ("e2e_ms", "end to end"),
    "normalised": ("normalised_ms", "normalised latency"),
}
# beyond these, the load generator is a bottleneck: a share of the measured time, and a delay
BUSY_CLIENT_SHARE, LATE_MS = 0.8, 50.0


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` in ms; goodput counts the requests that meet all goals."""
    goals = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            colon = ""
        if not colon or name not in GOALS or not goals[name] > 0:
            raise ConfigError(f"--goodput {word!r}: write {', '.join(f'{goal}:MS' for goal in GOALS)}")
    return goals


def parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        percentiles = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        percentiles = ()
    if not percentiles or not all(0 <= percent <= 100 for percent in percentiles):
        raise ConfigError(f"--percentiles {text!r}: write numbers from 0 to 100, such as 50,90,99")
    return percentiles


def parse_metrics(text: str) -> tuple[str, ...]:
    """`ttft,tpot,itl,e2el`: the latencies to print; the record has all of them."""
    metrics = tuple(word.strip() for word in text.split(",") if word.strip())
    if not metrics or not set(metrics) <= set(METRICS):
        raise ConfigError(f"--percentile-metrics {text!r}: write some of {','.join(METRICS)}")
    return metrics


def serve_report(
    plan: ServePlan,
    served: Served,
    percentiles: Sequence[float],
    goals: Mapping[str, float],
    detailed: bool = False,
    metrics: Sequence[str] = tuple(METRICS),
) -> BenchReport:
    rounds = [round_results(run, percentiles, goals) for run in served.rounds]
    settings = {
        "base_url": plan.base_url,
        "endpoint": plan.endpoint,
        "model": served.model,
        "workload": served.workload.source,
        "num_prompts": len(served.workload.queries),
        "num_too_long": served.workload.num_too_long,
        "seed": plan.workload.seed,
        "request_rates": [_rate_name(rate) for rate in plan.rates],
        "burstiness": plan.burstiness,
        "trace_speed": plan.trace_speed,
        "max_concurrency": plan.max_concurrency,
        "extra_body": dict(plan.extra),
        "goodput_goals_ms": dict(goals),
    }
    results: dict[str, Any] = {"rounds": rounds, "num_connections": served.num_connections}
    if detailed:
        results["requests"] = [[_detail(outcome) for outcome in run.outcomes] for run in served.rounds]
    head = [
        ("server", f"{plan.base_url}{plan.endpoint}"),
        ("model", served.model or "unknown"),
        ("requests", f"{len(served.workload.queries):,} ({served.workload.source})"),
    ]
    if len(rounds) == 1:
        return BenchReport(
            "serve", settings, results, head + _rows(rounds[0], metrics), _notes(served, rounds)
        )
    table = _sweep_table(rounds, percentiles)
    return BenchReport("serve", settings, results, head, ["", table, *_notes(served, rounds)])


def round_results(run: Round, percentiles: Sequence[float], goals: Mapping[str, float]) -> dict[str, Any]:
    """One rate's results. Latencies are of complete answers only; failures are counted by kind."""
    complete = [outcome for outcome in run.outcomes if outcome.error is None]
    num_prompt = sum(outcome.num_prompt_tokens for outcome in complete)
    num_output = sum(outcome.num_output_tokens for outcome in complete)
    per_token = [outcome.per_token for outcome in complete]
    return {
        "request_rate": _rate_name(run.rate),
        "seconds": run.seconds,
        "num_requests": len(run.outcomes),
        "num_complete": len(complete),
        "errors": dict(Counter(o.error for o in run.outcomes if o.error is not None).most_common()),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "requests_per_second": len(complete) / run.seconds,
        "output_tokens_per_second": num_output / run.seconds,
        "total_tokens_per_second": (num_prompt + num_output) / run.seconds,
        "peak_open": run.peak_open,
        "ttft_ms": _spread([o.to_first for o in complete], percentiles),
        "tpot_ms": _spread([value for value in per_token if value is not None], percentiles),
        "itl_ms": _spread([gap for o in complete for gap in o.gaps], percentiles),
        "e2e_ms": _spread([o.seconds for o in complete], percentiles),
        "normalised_ms": _spread(
            [o.seconds / o.num_output_tokens for o in complete if o.num_output_tokens], percentiles
        ),
        "goodput": _goodput(run, complete, goals),
        "client": {
            "cpu_seconds": run.cpu_seconds,
            "cpu_share": run.cpu_seconds / run.seconds,
            "late_ms": _spread(run.lateness, percentiles),
        },
    }


def _goodput(run: Round, complete: Sequence[Outcome], goals: Mapping[str, float]) -> dict[str, float] | None:
    """Requests per second that met every goal. An answer of one token has no TPOT and meets it."""
    if not goals:
        return None

    def is_good(outcome: Outcome) -> bool:
        seconds = {"ttft": outcome.to_first, "tpot": outcome.per_token or 0.0, "e2el": outcome.seconds}
        return all(1e3 * seconds[name] <= limit for name, limit in goals.items())

    num_good = sum(is_good(outcome) for outcome in complete)
    return {
        "num_good": num_good,
        "requests_per_second": num_good / run.seconds,
        "share": num_good / len(run.outcomes),
    }


def _spread(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """In ms; of no values, nothing."""
    if not seconds:
        return {}
    ordered = sorted(1e3 * value for value in seconds)
    percents = {f"p{percent:g}": percentile(ordered, percent) for percent in percentiles}
    return {"mean": statistics.fmean(ordered), **percents, "max": ordered[-1]}


def _detail(outcome: Outcome) -> dict[str, Any]:
    return {
        "sent": outcome.sent,
        "ttft_ms": 1e3 * outcome.to_first if outcome.error is None else None,
        "e2e_ms": 1e3 * outcome.seconds,
        "itl_ms": [1e3 * gap for gap in outcome.gaps],
        "num_prompt_tokens": outcome.num_prompt_tokens,
        "num_output_tokens": outcome.num_output_tokens,
        "status": outcome.status,
        "finish_reason": outcome.finish_reason,
        "error": outcome.error,
    }


# ---------------------------------------------------------------------- for people


def _rows(result: Mapping[str, Any], metrics: Sequence[str]) -> list[tuple[str, str]]:
    rows = [
        ("rate", f"{_rate_words(result['request_rate'])}, {result['peak_open']} open at most"),
        (
            "complete",
            f"{result['num_complete']:,} of {result['num_requests']:,} in {result['seconds']:.2f} s",
        ),
        *((f"  {count:,} failed", kind) for kind, count in result["errors"].items()),
        ("tokens", f"{result['num_prompt_tokens']:,} in, {result['num_output_tokens']:,} out"),
        ("requests/s", f"{result['requests_per_second']:.2f}"),
        ("tokens/s, out", f"{result['output_tokens_per_second']:,.1f}"),
        ("tokens/s, all", f"{result['total_tokens_per_second']:,.1f}"),
    ]
    if result["goodput"] is not None:
        good = result["goodput"]
        rows.append(("goodput", f"{good['requests_per_second']:.2f} requests/s, {good['share']:.1%} of all"))
    for key, name in (titles for metric, titles in METRICS.items() if metric in metrics):
        parts = [f"{word} {value:,.1f}" for word, value in result[key].items()]
        rows.append((name, f"{', '.join(parts)} ms" if parts else "none"))
    client = result["client"]
    rows.append(
        ("this client", f"{client['cpu_seconds']:.2f} s of CPU, {client['cpu_share']:.0%} of one core")
    )
    return rows


def _rate_words(rate: str | float) -> str:
    named = {"trace": "times of the trace", "inf": "all at once"}
    return named.get(str(rate), f"{rate:g} requests/s requested" if isinstance(rate, float) else str(rate))


def _sweep_table(rounds: Sequence[Mapping[str, Any]], percentiles: Sequence[float]) -> str:
    high = f"p{max(percentiles):g}"
    heads = ["rate", "complete", "failed", "requests/s", "tokens/s", "goodput/s", "TTFT", high]
    heads += ["TPOT", high, "ITL", high, "normalised"]
    table = [heads]
    for result in rounds:
        good = result["goodput"]
        cells = [
            str(result["request_rate"]),
            f"{result['num_complete']:,}",
            f"{result['num_requests'] - result['num_complete']:,}",
            f"{result['requests_per_second']:.2f}",
            f"{result['output_tokens_per_second']:,.1f}",
            "–" if good is None else f"{good['requests_per_second']:.2f}",
        ]
        for key in ("ttft_ms", "tpot_ms", "itl_ms"):
            cells += [_ms(result[key], "mean"), _ms(result[key], high)]
        table.append([*cells, _ms(result["normalised_ms"], "mean")])
    return (
        aligned(table, right=range(len(heads)))
        + "\n(times in ms: mean, then percentile; tokens/s: generated)"
    )


def _ms(spread: Mapping[str, float], name: str) -> str:
    return f"{spread[name]:,.1f}" if name in spread else "–"


def _notes(served: Served, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    if served.workload.num_too_long:
        notes.append(
            f"{served.workload.num_too_long} requests were longer than the server's context and left out"
        )
    if len(rounds) > 1:
        for result in rounds:
            notes += [
                f"rate {result['request_rate']}: {n} failed: {kind}" for kind, n in result["errors"].items()
            ]
    busy = max(result["client"]["cpu_share"] for result in rounds)
    # All requests at once are always late; a finite rate should be kept.
    late = max(
        (result["client"]["late_ms"]["max"] for result in rounds if result["request_rate"] != "inf"),
        default=0.0,
    )
    if busy > BUSY_CLIENT_SHARE or late > LATE_MS:
        notes.append(
            f"this client was short of CPU ({busy:.0%} of a core, up to {late:.0f} ms late): its own delays are in "
            "the results; run it on another machine or at lower rates"
        )
    return notes


def _rate_name(rate: float | None) -> str | float:
    if rate is None:
        return "trace"
    return "inf" if math.isinf(rate) else rate


def check_plotting(path: str) -> None:
    """ConfigError if matplotlib is missing, before anything is measured."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(f"--plot {path} needs matplotlib: pip install 'quire[bench]'") from None
    matplotlib.use("agg")  # files only: no display is needed


def plot_serve(served: Served, rounds: Sequence[dict[str, Any]], path: str) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    if len(rounds) > 1:
        _plot_sweep(left, right, rounds)
    else:
        _plot_distributions(left, right, served.rounds[0])
    figure.suptitle(f"{served.model or 'server'}: {served.workload.source}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error})") from error
    finally:
        pyplot.close(figure)


def _plot_sweep(left: Any, right: Any, rounds: Sequence[dict[str, Any]]) -> None:
    """Latency over the achieved rate, which an overloaded server keeps below the requested one."""
    drawn = sorted(
        (result for result in rounds if result["ttft_ms"]), key=lambda result: result["requests_per_second"]
    )
    reached = [result["requests_per_second"] for result in drawn]
    for axis, keys in ((left, ("normalised_ms", "tpot_ms")), (right, ("ttft_ms", "e2e_ms"))):
        for key in keys:
            axis.plot(
                reached, [result[key].get("mean") for result in drawn], marker="o", label=f"{key[:-3]}, mean"
            )
        axis.set(xlabel="requests per second, answered", ylabel="ms")
        plain_log(axis, "y")
        axis.legend()


def _plot_distributions(left: Any, right: Any, run: Round) -> None:
    complete = [outcome for outcome in run.outcomes if outcome.error is None]
    series = (
        (left, [o.to_first for o in complete], "time to first token"),
        (right, [gap for o in complete for gap in o.gaps], "between tokens"),
    )
    for axis, seconds, name in series:
        axis.ecdf([1e3 * value for value in seconds] or [0.0])
        axis.set(xlabel=f"{name}, ms", ylabel="share of all")


def plain_log(axis: Any, which: str) -> None:
    """A logarithmic axis with labels like 20, 50, 100 or 1,000 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axis.set_xscale if which == "x" else axis.set_yscale)("log")
    ticks = axis.xaxis if which == "x" else axis.yaxis
    low, high = sorted(ticks.get_view_interval())
    ratio = high / max(low, 1e-12)
    steps = (1.0,) if ratio >= 200 else (1.0, 2.0, 5.0) if ratio > 4 else tuple(map(float, range(1, 10)))
    ticks.set_major_locator(LogLocator(base=10, subs=steps))
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    ticks.set_minor_formatter(NullFormatter())
