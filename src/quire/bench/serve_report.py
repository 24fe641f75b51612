"""What `bench serve` found: latencies with percentiles, throughput, goodput, and every failure by its kind."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.report import BenchReport, percentile
from quire.bench.serve import Round, Served, ServePlan
from quire.bench.serve_call import Outcome
from quire.bench.table import aligned
from quire.core.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")
# of the measured time: beyond, figures are as much about the generator as about the server
BUSY_CLIENT_SHARE, LATE_MS = 0.8, 50.0
_LATENCIES = (
    ("ttft_ms", "first token (TTFT)"),
    ("tpot_ms", "per token (TPOT)"),
    ("itl_ms", "between tokens (ITL)"),
    ("e2e_ms", "end to end"),
    ("normalised_ms", "normalised latency"),
)


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` in ms; a request is good that keeps all of them."""
    goals = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            colon = ""
        if not colon or name not in GOALS or not goals[name] > 0:
            raise ConfigError(f"--goodput {word!r}: write {', '.join(f'{one}:MS' for one in GOALS)}")
    return goals


def parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = ()
    if not found or not all(0 <= one <= 100 for one in found):
        raise ConfigError(f"--percentiles {text!r}: write numbers from 0 to 100, such as 50,90,99")
    return found


def serve_report(
    plan: ServePlan,
    served: Served,
    percentiles: Sequence[float],
    goals: Mapping[str, float],
    detailed: bool = False,
) -> BenchReport:
    rounds = [round_results(one, percentiles, goals) for one in served.rounds]
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
        results["requests"] = [[_detail(one) for one in each.outcomes] for each in served.rounds]
    head = [
        ("server", f"{plan.base_url}{plan.endpoint}"),
        ("model", served.model or "not said"),
        ("requests", f"{len(served.workload.queries):,} ({served.workload.source})"),
    ]
    if len(rounds) == 1:
        return BenchReport("serve", settings, results, head + _rows(rounds[0]), _notes(served, rounds))
    table = _sweep(rounds, percentiles)
    return BenchReport("serve", settings, results, head, ["", table, *_notes(served, rounds)])


def round_results(one: Round, percentiles: Sequence[float], goals: Mapping[str, float]) -> dict[str, Any]:
    """Latencies are those of complete answers alone; failures are counted beside them, by kind."""
    complete = [outcome for outcome in one.outcomes if outcome.error is None]
    num_prompt = sum(outcome.num_prompt_tokens for outcome in complete)
    num_output = sum(outcome.num_output_tokens for outcome in complete)
    per_token = [outcome.per_token for outcome in complete]
    return {
        "request_rate": _rate_name(one.rate),
        "seconds": one.seconds,
        "num_requests": len(one.outcomes),
        "num_complete": len(complete),
        "errors": dict(Counter(o.error for o in one.outcomes if o.error is not None).most_common()),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "requests_per_second": len(complete) / one.seconds,
        "output_tokens_per_second": num_output / one.seconds,
        "total_tokens_per_second": (num_prompt + num_output) / one.seconds,
        "peak_open": one.peak_open,
        "ttft_ms": _spread([o.to_first for o in complete], percentiles),
        "tpot_ms": _spread([value for value in per_token if value is not None], percentiles),
        "itl_ms": _spread([gap for o in complete for gap in o.gaps], percentiles),
        "e2e_ms": _spread([o.seconds for o in complete], percentiles),
        "normalised_ms": _spread(
            [o.seconds / o.num_output_tokens for o in complete if o.num_output_tokens], percentiles
        ),
        "goodput": _goodput(one, complete, goals),
        "client": {
            "cpu_seconds": one.cpu_seconds,
            "cpu_share": one.cpu_seconds / one.seconds,
            "late_ms": _spread(one.lateness, percentiles),
        },
    }


def _goodput(one: Round, complete: Sequence[Outcome], goals: Mapping[str, float]) -> dict[str, float] | None:
    """Requests per second that kept every goal. An answer of one token has no TPOT and keeps it."""
    if not goals:
        return None

    def is_good(outcome: Outcome) -> bool:
        found = {"ttft": outcome.to_first, "tpot": outcome.per_token or 0.0, "e2el": outcome.seconds}
        return all(1e3 * found[name] <= limit for name, limit in goals.items())

    num_good = sum(is_good(outcome) for outcome in complete)
    return {
        "num_good": num_good,
        "requests_per_second": num_good / one.seconds,
        "share": num_good / len(one.outcomes),
    }


def _spread(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """In ms; of no values, nothing."""
    if not seconds:
        return {}
    ordered = sorted(1e3 * value for value in seconds)
    found = {"mean": statistics.fmean(ordered)}
    found |= {f"p{percent:g}": percentile(ordered, percent) for percent in percentiles}
    return {**found, "max": ordered[-1]}


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


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("rate", f"{_rate_words(found['request_rate'])}, {found['peak_open']} open at most"),
        ("complete", f"{found['num_complete']:,} of {found['num_requests']:,} in {found['seconds']:.2f} s"),
        *((f"  {count:,} failed", kind) for kind, count in found["errors"].items()),
        ("tokens", f"{found['num_prompt_tokens']:,} in, {found['num_output_tokens']:,} out"),
        ("requests/s", f"{found['requests_per_second']:.2f}"),
        ("tokens/s, out", f"{found['output_tokens_per_second']:,.1f}"),
        ("tokens/s, all", f"{found['total_tokens_per_second']:,.1f}"),
    ]
    if found["goodput"] is not None:
        good = found["goodput"]
        rows.append(("goodput", f"{good['requests_per_second']:.2f} requests/s, {good['share']:.1%} of all"))
    for key, name in _LATENCIES:
        parts = [f"{word} {value:,.1f}" for word, value in found[key].items()]
        rows.append((name, f"{', '.join(parts)} ms" if parts else "none"))
    client = found["client"]
    rows.append(
        ("this client", f"{client['cpu_seconds']:.2f} s of CPU, {client['cpu_share']:.0%} of one core")
    )
    return rows


def _rate_words(rate: str | float) -> str:
    named = {"trace": "as the trace has it", "inf": "all at once"}
    return named.get(str(rate), f"{rate:g} requests/s asked" if isinstance(rate, float) else str(rate))


def _sweep(rounds: Sequence[Mapping[str, Any]], percentiles: Sequence[float]) -> str:
    high = f"p{max(percentiles):g}"
    heads = ["rate", "complete", "failed", "requests/s", "tokens/s", "goodput/s", "TTFT", high]
    heads += ["TPOT", high, "ITL", high, "normalised"]
    table = [heads]
    for one in rounds:
        good = one["goodput"]
        cells = [
            str(one["request_rate"]),
            f"{one['num_complete']:,}",
            f"{one['num_requests'] - one['num_complete']:,}",
            f"{one['requests_per_second']:.2f}",
            f"{one['output_tokens_per_second']:,.1f}",
            "–" if good is None else f"{good['requests_per_second']:.2f}",
        ]
        for key in ("ttft_ms", "tpot_ms", "itl_ms"):
            cells += [_ms(one[key], "mean"), _ms(one[key], high)]
        table.append([*cells, _ms(one["normalised_ms"], "mean")])
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
        for one in rounds:
            notes += [f"rate {one['request_rate']}: {n} failed: {kind}" for kind, n in one["errors"].items()]
    busy = max(one["client"]["cpu_share"] for one in rounds)
    # Everything at once is late by its nature; a rate that was asked for should be kept.
    late = max(
        (one["client"]["late_ms"]["max"] for one in rounds if one["request_rate"] != "inf"), default=0.0
    )
    if busy > BUSY_CLIENT_SHARE or late > LATE_MS:
        notes.append(
            f"this client was short of CPU ({busy:.0%} of a core, up to {late:.0f} ms late): its own delays are in "
            "the figures; run it on another machine or at lower rates"
        )
    return notes


def _rate_name(rate: float | None) -> str | float:
    if rate is None:
        return "trace"
    return "inf" if math.isinf(rate) else rate
