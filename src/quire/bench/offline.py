"""Offline benchmarks of an engine in this process: throughput of many requests at once, latency of one batch."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.drive import Bench, Watched
from quire.bench.report import BenchReport, check_positive, engine_record, model_row, summary
from quire.bench.workload import Lengths, fixed, within
from quire.core.config import EngineConfig
from quire.engine.build import Built

WARM_UP = (fixed(64, 16, 4), fixed(8, 4, 1))  # kernels are chosen and memory is touched once


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    lengths: Sequence[Lengths]
    source: str  # of the lengths, in words
    sampling: str = "greedy"
    seed: int = 0
    warm_up: bool = True


def run_throughput(
    config: EngineConfig, built: Built, plan: ThroughputPlan, on_finish: Callable[[], None] = lambda: None
) -> BenchReport:
    bench = Bench(built, plan.seed)
    held, num_too_long = within(plan.lengths, built.report.limits.max_model_len)
    if plan.warm_up:
        for lengths in WARM_UP:
            bench.serve(bench.requests([_cut(request, built) for request in lengths]))
    watched = bench.serve(bench.requests(held, plan.sampling), on_finish)
    settings = {
        **engine_record(config, built),
        "lengths": plan.source,
        "sampling": plan.sampling,
        "seed": plan.seed,
        "num_prompts": len(held),
    }
    notes = [f"{num_too_long} requests were longer than the context and left out"] if num_too_long else []
    results = {**_throughput_results(watched), "num_too_long": num_too_long}
    return BenchReport("throughput", settings, results, _throughput_rows(results, plan, built), notes)


def _cut(lengths: Lengths, built: Built) -> Lengths:
    """A warm-up that any engine can serve, however small its context and pool."""
    room = min(built.report.limits.max_model_len, built.report.pool.num_tokens)
    num_prompt_tokens = max(1, min(lengths.num_prompt_tokens, room // 2))
    return Lengths(num_prompt_tokens, max(1, min(lengths.num_output_tokens, room - num_prompt_tokens)))


def _throughput_results(watched: Watched) -> dict[str, Any]:
    seconds, num_output = watched.seconds, watched.num_output_tokens
    num_steps = max(1, len(watched.step_seconds))
    return {
        "seconds": seconds,
        "num_requests": watched.num_requests,
        "num_prompt_tokens": watched.num_prompt_tokens,
        "num_output_tokens": num_output,
        "requests_per_second": watched.num_requests / seconds,
        "total_tokens_per_second": (watched.num_prompt_tokens + num_output) / seconds,
        "prompt_tokens_per_second": watched.num_prompt_tokens / seconds,
        "output_tokens_per_second": num_output / seconds,
        "num_steps": num_steps,
        "step_ms": summary([1e3 * value for value in watched.step_seconds]),
        "scheduler": _scheduler_results(watched),
        "mean_running": statistics.fmean(watched.num_running) if watched.num_running else 0.0,
        "max_running": max(watched.num_running, default=0),
        "num_preemptions": watched.num_preemptions,
        "first_token_seconds": summary([times.first_token for times in watched.requests]),
        "inter_token_seconds": summary(watched.gap_seconds),
    }


def _scheduler_results(watched: Watched) -> dict[str, Any]:
    """In ms per step: over all steps, and over the fullest ones, where it costs most."""
    fullest = max(watched.num_running, default=0)
    full = [i for i, running in enumerate(watched.num_running) if running >= 0.95 * fullest]
    return {
        "schedule_ms": summary([1e3 * value for value in watched.schedule_seconds]),
        "commit_ms": summary([1e3 * value for value in watched.commit_seconds]),
        "fullest_running": fullest,
        "fullest_steps": len(full),
        "fullest_schedule_ms": summary([1e3 * watched.schedule_seconds[i] for i in full]),
        "fullest_commit_ms": summary([1e3 * watched.commit_seconds[i] for i in full]),
    }


def _throughput_rows(results: dict[str, Any], plan: ThroughputPlan, built: Built) -> list[tuple[str, str]]:
    first, gap = results["first_token_seconds"], results["inter_token_seconds"]
    scheduler = results["scheduler"]
    return [
        model_row(built),
        ("requests", f"{results['num_requests']:,} ({plan.source}, {plan.sampling})"),
        ("tokens", f"{results['num_prompt_tokens']:,} in, {results['num_output_tokens']:,} out"),
        ("time", f"{results['seconds']:.2f} s"),
        ("requests/s", f"{results['requests_per_second']:.2f}"),
        ("tokens/s, all", f"{results['total_tokens_per_second']:,.1f}"),
        ("tokens/s, in", f"{results['prompt_tokens_per_second']:,.1f}"),
        ("tokens/s, out", f"{results['output_tokens_per_second']:,.1f}"),
        ("steps", f"{results['num_steps']:,}, {results['step_ms']['mean']:.2f} ms each"),
        ("scheduler", _scheduler_text(scheduler, "")),
        (
            "  when fullest",
            f"{_scheduler_text(scheduler, 'fullest_')}; with {scheduler['fullest_running']} sequences "
            f"({scheduler['fullest_steps']} steps)",
        ),
        ("running", f"{results['mean_running']:.1f} sequences on average, {results['max_running']} at most"),
        ("preemptions", f"{results['num_preemptions']}"),
        ("first token", f"{first['median']:.3f} s median, {first['p90']:.3f} s p90" if first else "none"),
        (
            "between tokens",
            f"{1e3 * gap['median']:.1f} ms median, {1e3 * gap['p90']:.1f} ms p90" if gap else "none",
        ),
    ]


def _scheduler_text(scheduler: dict[str, Any], prefix: str) -> str:
    """The median beside the mean: on a busy machine a few steps wait for a core, and the mean shows only that."""
    parts = [
        f"{times['median']:.3f} ms median, {times['mean']:.3f} mean to {verb} a step"
        for times, verb in (
            (scheduler[f"{prefix}schedule_ms"], "plan"),
            (scheduler[f"{prefix}commit_ms"], "commit"),
        )
        if times
    ]
    return "; ".join(parts)


# ---------------------------------------------------------------------- latency


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    batch_size: int = 1
    input_len: int = 128
    output_len: int = 64
    iterations: int = 5
    warm_up: int = 1
    sampling: str = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "iterations")


def run_latency(config: EngineConfig, built: Built, plan: LatencyPlan) -> BenchReport:
    """Prompts differ from iteration to iteration, so that none hits the prefix cache."""
    bench = Bench(built, plan.seed)
    lengths, _ = within(
        fixed(plan.input_len, plan.output_len, plan.batch_size), built.report.limits.max_model_len
    )
    for _ in range(plan.warm_up):
        bench.serve(bench.requests(lengths, plan.sampling))
    runs = [bench.serve(bench.requests(lengths, plan.sampling)) for _ in range(plan.iterations)]
    results = _latency_results(runs)
    settings = {**engine_record(config, built), **asdict(plan)}
    return BenchReport("latency", settings, results, _latency_rows(results, plan, built))


def _latency_results(runs: list[Watched]) -> dict[str, Any]:
    requests = [times for run in runs for times in run.requests]
    per_token = [times.per_token for times in requests if times.per_token is not None]
    return {
        "first_token_seconds": summary([times.first_token for times in requests]),
        "per_token_seconds": summary(per_token),
        "inter_token_seconds": summary([value for run in runs for value in run.gap_seconds]),
        "request_seconds": summary([times.last_token for times in requests]),
        "batch_seconds": summary([run.seconds for run in runs]),
        "output_tokens_per_second": summary([run.num_output_tokens / run.seconds for run in runs]),
    }


def _latency_rows(results: dict[str, Any], plan: LatencyPlan, built: Built) -> list[tuple[str, str]]:
    return [
        model_row(built),
        ("batch", f"{plan.batch_size} × {plan.input_len} in, {plan.output_len} out, {plan.iterations} times"),
        ("first token", _spread(results["first_token_seconds"], 1e3, "ms")),
        ("per token", _spread(results["per_token_seconds"], 1e3, "ms")),
        ("between tokens", _spread(results["inter_token_seconds"], 1e3, "ms")),
        ("whole request", _spread(results["request_seconds"], 1.0, "s")),
        ("tokens/s, out", f"{results['output_tokens_per_second']['median']:.1f} median"),
    ]


def _spread(times: dict[str, float], scale: float, unit: str) -> str:
    if not times:
        return "–"
    return f"{scale * times['median']:.2f} {unit} median, {scale * times['p90']:.2f} {unit} p90"
