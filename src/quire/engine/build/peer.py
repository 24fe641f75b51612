"""A rank beside rank 0: `main` with the arguments RANK REPORTS MEMORY. Started by start_ranks only.

It makes the same plan from the same settings, loads its part of the weights, agrees with the others on the pool and
then runs the Steps that it is sent. stdin brings the settings and the Steps, and ends with rank 0.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from quire.adapters.peft import PackedAdapter, received_packed
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build.assemble import make_parts
from quire.engine.build.pool import make_pool, start_kernel_warmup
from quire.engine.build.ranks import VERSION, on_rank, rank_part
from quire.engine.build.resolve import make_plan
from quire.engine.build.weights import load_models
from quire.parallel.ranks import Reporter, read_frames
from quire.parallel.wire import decode_step
from quire.runner.ranked import FINISH, RankRunner, StageRunner


def main() -> None:
    rank, reports, memory = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for rank 0
    reporter = Reporter(Connection(reports, readable=False))
    frames = read_frames()
    try:
        settings = json.loads(next(frames))
        received: dict[str, PackedAdapter] = {}  # adapters that the next step copies into blocks
        runner, read = _build(settings, rank, memory, received)
        reporter.groups = (runner.part.group, runner.part.stages, runner.part.world)
        collector = ThreadPoolExecutor(1, "rank-results")
        # of several stages: its results come when steps are finished
        first = runner if isinstance(runner, StageRunner) and runner.part.is_first else None
        for data in frames:
            if data == FINISH:
                if first is not None:
                    first.finish_next()
                    collector.submit(reporter.run, runner.collect)
                continue
            step, described = decode_step(data)
            for load, text in zip(step.adapter_loads, described, strict=True):
                received[load.key] = received_packed((text, next(frames)), read)
            reporter.run(partial(runner.launch, step))
            if first is None:
                collector.submit(reporter.run, runner.collect)
        runner.log_end()
    except StopIteration:
        pass
    except BaseException as fault:
        reporter.fail(fault)
    os._exit(0)  # rank 0 is gone: nothing that runs here matters any more


def _build(
    settings: dict[str, Any], rank: int, memory: int, received: dict[str, PackedAdapter]
) -> tuple[RankRunner, Callable[[str, str], PackedAdapter] | None]:
    """The runner of this rank's part, and what reads adapters for it."""
    flat: dict[str, Any] = {}
    for part, values in settings["config"].items():
        flat |= {part: values} if part == "speculative_config" else values
    config = on_rank(EngineConfig.of(**flat), rank)
    plan = make_plan(config)
    ours, theirs = (VERSION, plan.source.fingerprint), (settings["version"], settings["fingerprint"])
    if ours != theirs:
        raise ConfigError(
            f"Quire {ours[0]} with weights {ours[1][:12]} here, and {theirs[0]} with {theirs[1][:12]} on rank 0: "
            "start all ranks from one version and the same files"
        )
    plan = replace(plan, part=rank_part(plan, memory, rank, settings["address"]))
    models = load_models(plan, None)
    pool = make_pool(plan, models, start_kernel_warmup(plan))
    parts = make_parts(plan, models, pool, received)
    runner = parts.runner.runner
    assert isinstance(runner, RankRunner)
    return runner, None if parts.adapters is None else parts.adapters.store.read
