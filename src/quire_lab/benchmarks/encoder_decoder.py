"""Requests of an encoder-decoder model together and one by one, beside a floor on a GPU:
`python -m quire_lab.benchmarks.encoder_decoder [--shape flan-t5-small] [--output FILE]`.

Weights are random, prompts too, and every answer has its full length. The floor of a GPU is the encoder's products at
the data sheet's rate, and for each decode its weights and all K and V at the data sheet's bandwidth.
"""

import argparse
import json
import random
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.capacity import device_of, find_gpu, floor_of, plan_capacity
from quire.bench.machine import describe_machine, describe_versions
from quire.core.config import EngineConfig
from quire.weights.source import open_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", default="flan-t5-small", help="a published architecture, see architectures.py"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--one-by-one", type=int, default=8, help="requests of that measurement; 0: leave it out"
    )
    parser.add_argument("--rounds", type=int, default=3, help="the best of them counts")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    settings = {"load_format": "dummy", "enable_prefix_caching": False, **options.settings}
    llm = LLM(options.shape, use_tqdm=False, **settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, ignore_eos=True)
    _together(llm, 2, options.prompt_tokens, sampling)  # warm-up
    results: dict[str, Any] = {}
    seconds = min(
        _together(llm, options.requests, options.prompt_tokens, sampling) for _ in range(options.rounds)
    )
    results["together"] = _row(seconds, options.requests, options)
    if options.one_by_one:
        alone = min(
            sum(_together(llm, 1, options.prompt_tokens, sampling) for _ in range(options.one_by_one))
            for _ in range(options.rounds)
        )
        results["one_by_one"] = _row(alone, options.one_by_one, options)
        rates = [results[name]["requests_per_second"] for name in ("together", "one_by_one")]
        results["times_one_by_one"] = rates[0] / rates[1]
    if torch.cuda.is_available():
        results["floor_seconds"] = _floor(options, settings)
        results["share_of_floor"] = results["floor_seconds"] / seconds
    for name, value in results.items():
        print(f"{name:17} {value}", flush=True)
    if options.output:
        record = {
            "date": date.today().isoformat(),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {**vars(options), "output": None, "settings": settings},
            "results": results,
        }
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")
    llm.close()


def _together(llm: LLM, count: int, num_tokens: int, sampling: SamplingParams) -> float:
    """Seconds of `count` requests that arrive at once."""
    chosen = random.Random(count)
    size = llm.engine.limits.vocab_size
    prompts = [
        {"prompt_token_ids": [chosen.randrange(3, size) for _ in range(num_tokens)]} for _ in range(count)
    ]
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def _row(seconds: float, count: int, options: argparse.Namespace) -> dict[str, float]:
    return {
        "seconds": seconds,
        "num_requests": count,
        "requests_per_second": count / seconds,
        "output_tokens_per_second": count * options.output_tokens / seconds,
    }


def _floor(options: argparse.Namespace, settings: dict[str, Any]) -> float:
    """Seconds of all requests at once, by the data sheet of this machine's GPU."""
    device = device_of(find_gpu(torch.cuda.get_device_name()))
    config = EngineConfig.of(model=options.shape, **settings)
    capacity = plan_capacity(config, open_source(options.shape, load_format="dummy"), device)
    num_prompt_tokens = options.requests * options.prompt_tokens
    encoding = 2 * capacity.weights.encoder_parameters * num_prompt_tokens / device.flops
    contexts = (options.prompt_tokens + position for position in range(1, options.output_tokens + 1))
    decoding = sum(floor_of(capacity, device, context, options.requests).step_seconds for context in contexts)
    return encoding + decoding


if __name__ == "__main__":
    main()
