"""What leaving the pool costs: recompute, swap and auto in a pool of a quarter of the demand, on the built-in model.

usage: python -m quire_lab.benchmarks.preemption [--rounds N] [--requests N] [--output FILE]

Rounds of the three modes take turns, in another order each time, so that a busy machine slows all of them. Every round
must give the tokens of a pool that is large enough. `auto_over_best` is auto's median over the better median of the
other two.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin

MODES = ("recompute", "swap", "auto")
BLOCK_SIZE, OUTPUT = 16, 48
PROMPTS = (48, 320)  # tokens, shortest and longest


def workload(num_requests: int) -> tuple[list[dict[str, Any]], list[SamplingParams], int]:
    """Prompts, sampling, and the blocks that all of them together end with."""
    chosen = random.Random(11)
    lengths = [chosen.randint(*PROMPTS) for _ in range(num_requests)]
    prompts = [{"prompt_token_ids": [chosen.randrange(1000, 40000) for _ in range(n)]} for n in lengths]
    sampling = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=OUTPUT, ignore_eos=True)
        for i in range(num_requests)
    ]
    return prompts, sampling, sum(-(-(n + OUTPUT) // BLOCK_SIZE) for n in lengths)


def run(llm: LLM, prompts: list[dict[str, Any]], sampling: list[SamplingParams]) -> dict[str, Any]:
    llm.engine.memory.reset_prefix_index()
    stats, swapped = llm.engine.scheduler.stats, llm.engine.memory.swap.stats
    before = (stats.num_preemptions, stats.num_swaps_out, swapped.blocks_out + swapped.blocks_in)
    computed = llm.engine.stats.num_computed_tokens
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    llm.engine.check_integrity()
    return {
        "seconds": round(seconds, 3),
        "preemptions": stats.num_preemptions - before[0],
        "swaps": stats.num_swaps_out - before[1],
        "blocks_moved": swapped.blocks_out + swapped.blocks_in - before[2],
        "computed_tokens": llm.engine.stats.num_computed_tokens - computed,
        "tokens": [tuple(output.outputs[0].token_ids) for output in outputs],
    }


def measure(rounds: int, num_requests: int) -> dict[str, Any]:
    prompts, sampling, demand = workload(num_requests)
    settings: dict[str, Any] = {"use_tqdm": False, "max_model_len": 1024, "block_size": BLOCK_SIZE}
    with LLM(num_blocks=2 * demand, **settings) as llm:
        wanted = run(llm, prompts, sampling)
    engines = {mode: LLM(num_blocks=demand // 4, preemption_mode=mode, **settings) for mode in MODES}
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):  # the first warms up
        for mode in MODES[number % 3 :] + MODES[: number % 3]:
            result = run(engines[mode], prompts, sampling)
            if result.pop("tokens") != wanted["tokens"]:
                raise SystemExit(f"{mode}: other tokens than in a pool that is large enough")
            if number:
                runs[mode].append(result)
                print(f"round {number} {mode:10}", json.dumps(result), flush=True)
    line = [text for text in engines["auto"].report.lines() if text.startswith("swap")]
    for llm in engines.values():
        llm.close()
    medians = {mode: statistics.median(each["seconds"] for each in runs[mode]) for mode in MODES}
    return {
        "requests": num_requests,
        "demand_blocks": demand,
        "pool_blocks": demand // 4,
        "block_size": BLOCK_SIZE,
        "swap": line,
        "large_pool_seconds": wanted["seconds"],
        "median_seconds": medians,
        "auto_over_best": round(medians["auto"] / min(medians["recompute"], medians["swap"]), 3),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {
        **describe_origin(),
        **measure(arguments.rounds, arguments.requests),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("runs", "machine", "versions")}, indent=1))


if __name__ == "__main__":
    main()
