"""A rank beside rank 0: `python -m quire.engine.build.peer RANK REPORTS MEMORY`. Started by start_ranks only.

It makes the same plan from the same settings, loads its part of the weights, agrees with the others on the pool and
then runs the Steps that it is sent. stdin brings the settings and the Steps, and ends with rank 0.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
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
from quire.runner.ranked import FINISH, RankRunner

Read = Callable[[str, str], PackedAdapter]


def main() -> None:
    rank, reports, memory = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for rank 0
    reporter = Reporter(reports)
    frames = read_frames(sys.stdin.buffer)
    try:
        settings = json.loads(next(frames))
        received: dict[str, PackedAdapter] = {}  # adapters that the next step copies into blocks
        runner, read = _build(settings, rank, memory, received)
        launched: queue.SimpleQueue[None] = queue.SimpleQueue()
        later = (
            runner.part.layers is not None and runner.part.is_first
        )  # results come when steps are finished
        threading.Thread(target=_collect, args=(runner, launched, reporter), daemon=True).start()
        for data in frames:
            if data == FINISH:
                if later:
                    runner.finish_next()
                    launched.put(None)
                continue
            step, blobs = decode_step(data)
            loads = zip(step.adapter_loads, blobs, strict=True)
            received.update((load.key, received_packed(blob, read)) for load, blob in loads)
            runner.launch(step)
            if not later:
                launched.put(None)
        runner.log_end()
    except StopIteration:
        pass
    except BaseException as fault:
        reporter.fail(fault)
    os._exit(0)  # rank 0 is gone: nothing that runs here matters any more


def _build(
    settings: dict[str, Any], rank: int, memory: int, received: dict[str, PackedAdapter]
) -> tuple[RankRunner, Read | None]:
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
    plan = replace(plan, part=rank_part(plan, memory, rank, settings["store"]))
    models = load_models(plan, None)
    pool = make_pool(plan, models, start_kernel_warmup(plan))
    parts = make_parts(plan, models, pool, received)
    runner = parts.runner.runner
    assert isinstance(runner, RankRunner)
    return runner, None if parts.adapters is None else parts.adapters.store.read


def _collect(runner: RankRunner, launched: "queue.SimpleQueue[None]", reporter: Reporter) -> None:
    try:
        while True:
            launched.get()
            runner.collect()
    except BaseException as fault:
        reporter.fail(fault)


if __name__ == "__main__":
    main()
