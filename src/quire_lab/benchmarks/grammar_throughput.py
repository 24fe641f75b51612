"""What masks cost: tokens a second at batch 32 with a schema and without, on the built-in model.

usage: python -m quire_lab.benchmarks.grammar_throughput [--rounds N] [--output FILE]

Rounds with and without take turns, so that a busy machine slows both; every request makes the same number of tokens.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams, StructuredOutput
from quire.bench.machine import describe_origin

BATCH, TOKENS = 32, 96
SCHEMA = {
    "type": "array",
    "minItems": 50,  # more than fits, so that no answer ends early
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            "note": {"type": "string"},
        },
        "required": ["name", "age", "tags", "note"],
        "additionalProperties": False,
    },
}


def measure(llm: LLM, structured: StructuredOutput | None) -> dict[str, float]:
    prompts = [f"Write list number {i} of people as JSON: " for i in range(BATCH)]
    sampling = SamplingParams(max_tokens=TOKENS, seed=1, ignore_eos=True, structured=structured)
    stats = llm.engine.stats
    steps, masks = stats.num_steps, stats.mask_seconds
    started = time.perf_counter()
    results = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return {
        "tokens_per_second": round(num_tokens / seconds, 1),
        "mask_ms_per_step": round(1e3 * (stats.mask_seconds - masks) / (stats.num_steps - steps), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    form = StructuredOutput.json(SCHEMA)
    with LLM(use_tqdm=False, max_num_seqs=BATCH, enable_prefix_caching=False) as llm:
        for structured in (None, form):
            measure(llm, structured)
        pairs = [(measure(llm, None), measure(llm, form)) for _ in range(arguments.rounds)]
    ratios = [formed["tokens_per_second"] / free["tokens_per_second"] for free, formed in pairs]
    results: dict[str, Any] = {
        **describe_origin(),
        "batch": BATCH,
        "tokens": TOKENS,
        "rounds": [{"free": free, "formed": formed} for free, formed in pairs],
        "ratio": round(statistics.median(ratios), 3),
    }
    for free, formed in pairs:
        print(f"free {free['tokens_per_second']:8.1f} tok/s, with the schema {formed}")
    print(f"median ratio {results['ratio']}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
