"""Engines for experiments: built with the user's settings and the experiment's own, closed afterwards."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quire.bench.drive import Bench, BenchRequest
from quire.bench.workload import Lengths
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import BuildPlan, build
from quire.engine.build.assemble import assemble
from quire.engine.build.resolve import Precision, make_plan
from quire.engine.build.weights import LoadedModels, load_models
from quire.engine.engine import Engine
from quire.models.model import DecoderModel
from quire.quant.format import NumberFormat
from quire_lab.measure.quality import kv_dtype_of
from quire_lab.report.experiment import Setup


@contextmanager
def opened(setup: Setup, **changes: Any) -> Iterator[Bench]:
    """An engine with the user's settings, except the settings that the experiment is about."""
    built = build(EngineConfig.of(**{**setup.engine, **changes}))
    try:
        yield Bench(built, setup.seed)
    finally:
        built.engine.close()


@contextmanager
def opened_in(
    setup: Setup, number_format: NumberFormat, **changes: Any
) -> Iterator[tuple[Bench, DecoderModel]]:
    """An engine whose model is in this number format, and that model. Nothing is written to the cache."""
    number_format.worth_keeping = False
    plan = make_plan(EngineConfig.of(**{**setup.engine, **changes}))
    kv_dtype = (
        kv_dtype_of(number_format) if plan.config.memory.kv_cache_dtype == "auto" else plan.precision.kv_dtype
    )
    plan = replace(plan, precision=Precision(plan.precision.device, number_format, kv_dtype))
    kept: list[DecoderModel] = []

    def load(plan: BuildPlan) -> LoadedModels:
        models = load_models(plan, None)
        kept.append(models.model)
        return models

    built = assemble(plan, load, time.perf_counter())
    try:
        yield Bench(built, setup.seed), kept[0]
    finally:
        built.engine.close()


def warm_up(bench: Bench) -> None:
    """Memory is touched and kernels are chosen once, before anything is timed."""
    room = min(bench.built.report.limits.max_model_len, bench.built.report.pool.num_tokens)
    half = max(1, min(64, room // 4))
    bench.serve(bench.requests([Lengths(half, min(8, half))] * 2))
    bench.engine.memory.reset_prefix_index()


def prompt_rate(bench: Bench, num_tokens: int = 256) -> float:
    """Prompt tokens a second, from one prompt: how large an experiment may be is decided by it."""
    report = bench.built.report
    num_tokens = max(1, min(num_tokens, report.limits.max_model_len // 2, report.pool.num_tokens // 2))
    best = min(bench.serve(bench.requests([Lengths(num_tokens, 1)])).seconds for _ in range(3))
    return num_tokens / best


def step_seconds(bench: Bench, num_sequences: int, context: int, num_steps: int) -> list[float]:
    """Wall time of decode steps with this many sequences, once all of their prompts are computed.

    For engines without a step in flight: with one, a step that waited for the host returns at once when it is asked.
    """
    engine = bench.engine
    # None may end while others' prompts are still computed, at least one of which every step begins; all are aborted
    num_outputs = num_steps + 4 + num_sequences
    requests = bench.requests([Lengths(context, num_outputs)] * num_sequences)
    ids = submit(engine, requests, f"step-{num_sequences}-{time.monotonic_ns()}")
    num_begun: set[str] = set()
    while len(num_begun) < num_sequences:
        num_begun.update(update.request_id for update in engine.step() if update.token_ids)
    engine.step()  # the first pure decode of a size is recorded
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return times


def submit(engine: Engine, requests: Sequence[BenchRequest], name: str) -> list[str]:
    """All of them, under ids that begin with `name`."""
    ids = [f"{name}-{index}" for index in range(len(requests))]
    for request_id, one in zip(ids, requests, strict=True):
        engine.add(Request(request_id, one.prompt_token_ids, one.sampling))
    return ids


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly that many tokens: end-of-sequence is ignored."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def in_words(bench: Bench) -> str:
    """The model and where it runs, for a note under a figure."""
    report = bench.built.report
    where = "CPU" if report.precision.device.type == "cpu" else "GPU"
    threads = f", {report.start.num_threads} threads" if where == "CPU" else ""
    return f"{report.model}, {report.precision.format_name} on the {where}{threads}"
