"""What evicted prefixes are worth: long prompts in turn, in a pool that holds three of them, on the built-in model.

usage: python -m quire_lab.benchmarks.offload_cache [--shape llama8b] [--rounds N] [--output FILE]

Milliseconds to an answer of one token, for prompts that the pool has evicted since: computed again, from host memory,
and from the disk after a restart. All must give the same tokens on a CPU. `--shape` is for a GPU: random weights of a
shape of `workloads.py` and longer prompts; there a rounding may turn a token, and equal answers are counted.
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
from quire.bench.machine import describe_origin
from quire_lab.benchmarks import workloads

NUM_PROMPTS, BLOCK = 8, 16
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


class Same:
    """Counts answers that are as they were at first; on a CPU each of them must be."""

    def __init__(self, wanted: list[tuple[int, ...]], is_exact: bool) -> None:
        self._wanted, self._is_exact = wanted, is_exact
        self.num_same = self.num_answers = 0

    def count(self, name: str, tokens: list[tuple[int, ...]]) -> None:
        same = sum(mine == right for mine, right in zip(tokens, self._wanted, strict=True))
        if self._is_exact and same < len(tokens):
            raise SystemExit(f"{name}: other tokens")
        self.num_same, self.num_answers = self.num_same + same, self.num_answers + len(tokens)


def _prompt(chosen: random.Random, size: int) -> list[int]:
    return [chosen.randrange(1000, 40000) for _ in range(size)]


def measure(rounds: int, size: int, settings: dict[str, Any], is_exact: bool) -> dict[str, Any]:
    chosen = random.Random(0)
    prompts = [_prompt(chosen, size) for _ in range(NUM_PROMPTS)]
    pool = 3 * size // BLOCK + 10
    settings = {"use_tqdm": False, "max_model_len": 2 * size, "num_blocks": pool, **settings}
    times: dict[str, list[float]] = {"computed again": [], "from host memory": [], "from the disk": []}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        offload = {"kv_offload_gb": 0.5 if is_exact else 8.0, "kv_offload_dir": folder}
        with LLM(**settings) as plain, LLM(**settings, **offload) as home:
            ask(plain, prompts)  # kernels are loaded
            same = Same(ask(plain, prompts)[1], is_exact)
            ask(home, prompts)
            for _ in range(rounds):  # take turns, so that a busy machine slows both
                for name, llm in (("computed again", plain), ("from host memory", home)):
                    seconds, tokens = ask(llm, prompts)
                    times[name] += seconds
                    same.count(name, tokens)
            counts["host_hit_blocks"] = home.engine.memory.offload_cache.stats.host_hits
        for _ in range(rounds):
            with LLM(**settings, **offload) as again:
                ask(again, [_prompt(chosen, size)])  # a new prompt loads the kernels
                seconds, tokens = ask(again, prompts)
                times["from the disk"] += seconds
                same.count("from the disk", tokens)
                counts["disk_hit_blocks"] = again.engine.memory.offload_cache.stats.disk_hits
    medians = {name: round(1e3 * statistics.median(durations), 1) for name, durations in times.items()}
    return {
        "prompts": NUM_PROMPTS,
        "prompt_tokens": size,
        "pool_blocks": pool,
        "median_ms": medians,
        "same_answers": f"{same.num_same} of {same.num_answers}",
        **counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=list(workloads.SHAPES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {}
        if arguments.shape:
            Path(folder, "config.json").write_text(json.dumps(workloads.SHAPES[arguments.shape]))
            settings = {"model": folder, "load_format": "dummy"}
        record = measure(arguments.rounds, 3840 if arguments.shape else 480, settings, not arguments.shape)
    result = {
        **describe_origin(),
        "shape": arguments.shape or "built-in",
        **record,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("machine", "versions")}, indent=1))


if __name__ == "__main__":
    main()
