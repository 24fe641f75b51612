"""Perplexity of the built-in model in fp32 and int8 on a text: what the default costs in quality.

usage: python -m quire_lab.benchmarks.perplexity --text FILE [--windows N] [--output FILE]

FILE is plain text, or XQuAD's JSON, of which the paragraphs are taken. Windows of 512 tokens, each scored alone.
"""

import argparse
import json
import math
from pathlib import Path

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin

WINDOW = 512


def read_text(path: Path) -> str:
    if path.suffix != ".json":
        return path.read_text()
    articles = json.loads(path.read_text())["data"]
    return "\n\n".join(p["context"] for article in articles for p in article["paragraphs"])


def perplexity(text: str, max_windows: int | None, **settings: object) -> tuple[float, int]:
    """(perplexity, windows scored)"""
    with LLM(max_num_seqs=4, num_blocks=400, **settings) as llm:
        token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
        pieces = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW, WINDOW)][:max_windows]
        scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        results = llm.generate([{"prompt_token_ids": piece} for piece in pieces], scored)
    logprobs = [
        position[token_id].logprob
        for result in results
        for position, token_id in zip(result.prompt_logprobs or (), result.prompt_token_ids, strict=True)
        if position is not None
    ]
    return math.exp(-sum(logprobs) / len(logprobs)), len(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/perplexity.json"))
    arguments = parser.parse_args()
    text = read_text(arguments.text)
    exact, count = perplexity(text, arguments.windows, quantization="none")
    quantized, _ = perplexity(text, arguments.windows, quantization="int8")
    print(
        f"{count} windows of {WINDOW} tokens: fp32 {exact:.4f}, int8 {quantized:.4f}, {quantized / exact - 1:+.3%}"
    )
    result = {
        **describe_origin(),
        "text": arguments.text.name,
        "window": WINDOW,
        "num_windows": count,
        "fp32": exact,
        "int8": quantized,
        "ratio": quantized / exact,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
