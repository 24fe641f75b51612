"""What evicted prefixes are worth: long prompts in turn, in a pool that holds a few of them, on the built-in model.

usage: python benchmarks/second_home.py [--rounds N] [--output benchmarks/results/second_home.json]

Milliseconds to an answer of one token, for prompts that the pool has evicted since: computed again, from host memory,
and from the disk after a restart. All must give the same tokens.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.machine import describe_machine

NUM_PROMPTS, PROMPT, POOL = 8, 480, 100  # prompts, tokens of each, blocks: the pool holds three of them
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def ask(llm: LLM, prompts: list[list[int]]) -> tuple[list[float], list[tuple[int, ...]]]:
    """Seconds and tokens of each prompt, one after the other."""
    seconds, tokens = [], []
    for prompt in prompts:
        started = time.perf_counter()
        result = llm.generate({"prompt_token_ids": prompt}, ONE, use_tqdm=False)[0]
        seconds.append(time.perf_counter() - started)
        tokens.append(tuple(result.outputs[0].token_ids))
    return seconds, tokens


def measure(rounds: int) -> dict[str, Any]:
    chosen = random.Random(0)
    prompts = [[chosen.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(NUM_PROMPTS)]
    settings: dict[str, Any] = {"use_tqdm": False, "max_model_len": 1024, "num_blocks": POOL}
    times: dict[str, list[float]] = {"computed again": [], "from host memory": [], "from the disk": []}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        offload = {"kv_offload_gb": 0.5, "kv_offload_dir": folder}
        with LLM(**settings) as plain, LLM(**settings, **offload) as home:
            _, wanted = ask(plain, prompts)
            ask(home, prompts)
            for _ in range(rounds):  # take turns, so that a busy machine slows both
                for name, llm in (("computed again", plain), ("from host memory", home)):
                    seconds, tokens = ask(llm, prompts)
                    times[name] += seconds
                    if tokens != wanted:
                        raise SystemExit(f"{name}: other tokens")
            counts["host_hit_blocks"] = home.engine.memory.home.stats.host_hits
        for _ in range(rounds):
            with LLM(**settings, **offload) as again:
                seconds, tokens = ask(again, prompts)
                times["from the disk"] += seconds
                if tokens != wanted:
                    raise SystemExit("from the disk: other tokens")
                counts["disk_hit_blocks"] = again.engine.memory.home.stats.disk_hits
    medians = {name: round(1e3 * statistics.median(found), 1) for name, found in times.items()}
    return {
        "prompts": NUM_PROMPTS,
        "prompt_tokens": PROMPT,
        "pool_blocks": POOL,
        "median_ms": medians,
        **counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {"machine": describe_machine(), **measure(arguments.rounds)}
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1))


if __name__ == "__main__":
    main()
