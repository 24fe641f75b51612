"""The built-in model on a GPU: fp32 tokens equal the CPU's, and what bf16, fp8 and fp8 KV cost in quality.

usage: python -m quire_lab.benchmarks.gpu_quality --reference FILE --write-reference       (on a CPU, once)
       python -m quire_lab.benchmarks.gpu_quality --reference FILE --text FILE --output FILE [--model FILE]  (on a GPU)

The reference holds prompts and the CPU's greedy tokens in fp32. Perplexity is over windows of 512 tokens.
"""

import argparse
import json
import math
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire_lab.benchmarks.perplexity import WINDOW, read_text

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a CPU cache works.",
    "List five fruits and their colours.",
    "Why is the sky blue?",
    "Translate 'good morning' to Spanish, German and Italian.",
    "What are the rules of chess?",
    "Give me a recipe for pancakes.",
)
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"quantization": "fp8"},
    "fp8, fp8 KV": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "bfloat16, fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "bfloat16, deterministic": {"dtype": "bfloat16", "deterministic": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--write-reference", action="store_true")
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.write_reference:
        _write_reference(options)
    else:
        _measure(options)


def _write_reference(options: argparse.Namespace) -> None:
    with LLM(options.model, device="cpu", dtype="float32", quantization="none") as llm:
        prompts = [llm.template.render([{"role": "user", "content": one}]) for one in QUESTIONS]
        token_ids = [llm.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        outputs = llm.generate([{"prompt_token_ids": one} for one in token_ids], GREEDY)
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    options.reference.write_text(json.dumps({"prompts": token_ids, "answers": answers}))


def _measure(options: argparse.Namespace) -> None:
    import torch

    reference = json.loads(options.reference.read_text())
    rows = [_measure_format(name, settings, reference, options) for name, settings in FORMATS.items()]
    exact = rows[0]
    for row in rows:
        scores = row.pop("logprobs")
        differences = [abs(a - b) for a, b in zip(scores, exact.get("scores", scores), strict=True)]
        if row is exact:
            exact["scores"] = scores
        row["perplexity_over_float32"] = row["perplexity"] / exact["perplexity"]
        row["mean_logprob_difference"] = sum(differences) / len(differences)
        row["largest_logprob_difference"] = max(differences)
        print(json.dumps({key: value for key, value in row.items() if key != "scores"}), flush=True)
    del exact["scores"]
    if options.output:
        result = {
            "date": date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "text": options.text.name,
            "window": WINDOW,
            "num_windows": options.windows,
            "formats": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _measure_format(
    name: str, settings: dict[str, Any], reference: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    with LLM(
        options.model, use_tqdm=False, max_num_seqs=64, kv_cache_memory_bytes=2 << 30, **settings
    ) as llm:
        prompts = [{"prompt_token_ids": asked} for asked in reference["prompts"]]
        together = llm.generate(prompts, GREEDY, use_tqdm=False)
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
        token_ids = llm.tokenizer.encode(read_text(options.text), add_special_tokens=False)
        pieces = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW, WINDOW)]
        scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        results = llm.generate(
            [{"prompt_token_ids": piece} for piece in pieces[: options.windows]], scored, use_tqdm=False
        )
        logprobs = [
            position[token_id].logprob
            for result in results
            for position, token_id in zip(result.prompt_logprobs or (), result.prompt_token_ids, strict=True)
            if position is not None
        ]
        long = GREEDY.changed(max_tokens=128)
        llm.generate(prompts * 8, long, use_tqdm=False)
        began = time.perf_counter()
        llm.generate(prompts * 8, long, use_tqdm=False)
        seconds = time.perf_counter() - began
    answers = [list(output.outputs[0].token_ids) for output in together]
    return {
        "format": name,
        "answers_equal_to_cpu": sum(a == b for a, b in zip(answers, reference["answers"], strict=True)),
        "answers_equal_alone_and_together": sum(
            a == list(b.outputs[0].token_ids) for a, b in zip(answers, alone, strict=True)
        ),
        "num_answers": len(answers),
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
        "tokens_per_second_at_64": 64 * 128 / seconds,
        "logprobs": logprobs,
    }


if __name__ == "__main__":
    main()
