"""Two ranks on this CPU: sums through shared memory, and decoding beside one process with as many threads.

usage: python -m quire_lab.benchmarks.ranks [--rounds N] [--output FILE]

Systems take turns: what else the machine does falls on all of them. p10 of the sums, least times of decode steps.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.kernels import native
from quire.kernels.collective import cpu as collective
from quire.parallel.processes import SharedGroup

WIDTH = 576
ROWS = (1, 8, 32, 128, 512)
SEQUENCES = (1, 32)
TOKENS = 48
SYSTEMS = {
    "one process, two threads": {"num_threads": 2},
    "two ranks of one thread": {"num_threads": 1, "tensor_parallel_size": 2},
}


def _sums(descriptor: int, rank: int, results: Any) -> None:
    native.set_num_threads(1)
    torch.set_num_threads(1)
    memory = mmap.mmap(descriptor, SharedGroup.num_bytes(collective, 2))
    group = SharedGroup(collective, memory, 0, rank, 2)
    microseconds = {}
    for rows in ROWS:
        x, took = torch.zeros(rows, WIDTH), []
        for _ in range(1000):
            started = time.perf_counter()
            group.all_reduce(x, "sum")
            took.append(time.perf_counter() - started)
        microseconds[f"{rows}x{WIDTH}"] = [
            round(sorted(took)[int(share * len(took))] * 1e6, 1) for share in (0.1, 0.5)
        ]
    if rank == 0:
        results.put(microseconds)


def sums() -> dict[str, list[float]]:
    """Microseconds of an all-reduce of float32, called from Python: p10 and p50."""
    descriptor = collective.shared_file(SharedGroup.num_bytes(collective, 2))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_sums, args=(descriptor, rank, results)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    microseconds: dict[str, list[float]] = results.get(timeout=120)
    for rank in ranks:
        rank.join()
    os.close(descriptor)
    return microseconds


def step_seconds(llm: LLM, count: int) -> float:
    """Of a decode step of `count` sequences: the time of TOKENS steps behind the prompts'."""
    prompts = [{"prompt_token_ids": [100 + i, *range(200, 230)]} for i in range(count)]
    took = []
    for tokens in (1, 1 + TOKENS):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        llm.engine.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        took.append(time.perf_counter() - started)
    return (took[1] - took[0]) / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/ranks.json"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {**describe_origin(), "rounds": arguments.rounds, "sum_microseconds": sums()}
    settings: dict[str, Any] = {
        "max_num_seqs": 32,
        "num_blocks": 400,
        "max_model_len": 512,
        "use_tqdm": False,
    }
    systems = {name: LLM(**settings, **options) for name, options in SYSTEMS.items()}
    least: dict[str, dict[int, float]] = {name: dict.fromkeys(SEQUENCES, 1e9) for name in systems}
    for _ in range(arguments.rounds):
        for name, llm in systems.items():
            for count in SEQUENCES:
                least[name][count] = min(least[name][count], step_seconds(llm, count))
    for llm in systems.values():
        llm.close()
    alone, ranked = least.values()
    result["step_milliseconds"] = {
        name: {n: round(seconds * 1e3, 2) for n, seconds in times.items()} for name, times in least.items()
    }
    result["speed_of_two_ranks"] = {n: round(alone[n] / ranked[n], 3) for n in SEQUENCES}
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
