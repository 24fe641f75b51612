"""Latency: one batch at a time, again and again."""

from dataclasses import dataclass
from typing import Any

from quire.bench.drive import Bench, Watched
from quire.bench.report import BenchReport, engine_record, summary
from quire.bench.workload import fixed, within
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import Built


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
        for name in ("batch_size", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give at least 1")


def run_latency(config: EngineConfig, built: Built, plan: LatencyPlan) -> BenchReport:
    """Prompts differ from iteration to iteration, so that none hits the prefix cache."""
    bench = Bench(built, plan.seed)
    lengths, _ = within(fixed(plan.input_len, plan.output_len, plan.batch_size), built.report.max_model_len)
    for _ in range(plan.warm_up):
        bench.serve(bench.requests(lengths, plan.sampling))
    runs = [bench.serve(bench.requests(lengths, plan.sampling)) for _ in range(plan.iterations)]
    results = _results(runs)
    settings = {
        **engine_record(config, built),
        "batch_size": plan.batch_size,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "iterations": plan.iterations,
        "warm_up": plan.warm_up,
        "sampling": plan.sampling,
        "seed": plan.seed,
    }
    return BenchReport("latency", settings, results, _rows(results, plan, built))


def _results(runs: list[Watched]) -> dict[str, Any]:
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


def _rows(results: dict[str, Any], plan: LatencyPlan, built: Built) -> list[tuple[str, str]]:
    return [
        (
            "model",
            f"{built.report.model}, {built.report.precision.format_name}, {built.report.num_threads} threads",
        ),
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
