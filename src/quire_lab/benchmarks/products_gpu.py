"""Matrix products on a GPU: PyTorch's choice of algorithm beside the one that was measured to be the fastest.

    PYTHONPATH=src python -m quire_lab.benchmarks.products_gpu [--shapes llama8b,opt13b] [--output results.json]

For each matrix of a published shape and each number of tokens: µs per product inside a CUDA graph, weights read from
memory, the median of replays, both in turns; the error of the chosen algorithm against float32 beside that of
PyTorch's. The floor is what reading the weights at 4.26 TB/s or multiplying at 740 TFLOP/s takes. Needs torch only.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire.bench.machine import describe_origin
from quire.kernels.linear.autotune import COLD_BYTES, TORCH_DEFAULT, fastest
from quire.kernels.linear.cublaslt import GemmPlan, GemmShape
from quire.kernels.linear.reference import gemm
from quire.kernels.measurement import graph_seconds
from quire_lab.benchmarks import workloads

DEVICE = torch.device("cuda")
TOKENS = (
    8,
    16,
    32,
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    448,
    512,
    640,
    704,
    768,
    832,
    896,
    960,
    1024,
    2048,
    4096,
    8192,
)
MAX_LOGITS = 1024  # the output head serves as many rows at once, not prompts


def kinds_of(shape: str) -> dict[str, GemmShape]:
    config = workloads.SHAPES[shape]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    if config["model_type"] == "opt":
        of, inner = partial(GemmShape, dtype=torch.float16), config["ffn_dim"]
        return {
            "qkv": of(3 * hidden, hidden, bias=True),
            "output": of(hidden, hidden, bias=True, residual=True),
            "up": of(inner, hidden, bias=True, relu=True),
            "down": of(hidden, inner, bias=True, residual=True),
            "head": of(vocab, hidden, widened=True),
        }
    of, inner, head_dim = (
        partial(GemmShape, dtype=torch.bfloat16),
        config["intermediate_size"],
        config["head_dim"],
    )
    queries = config["num_attention_heads"] * head_dim
    return {
        "qkv": of(queries + 2 * config["num_key_value_heads"] * head_dim, hidden),
        "output": of(hidden, queries, residual=True),
        "gate_up": of(2 * inner, hidden),
        "down": of(hidden, inner, residual=True),
        "head": of(vocab, hidden, widened=True),
    }


def weights_of(kind: GemmShape) -> list[tuple[Tensor, Tensor | None]]:
    """As many as do not fit the chip's cache."""
    count = -(-COLD_BYTES // (kind.num_rows * kind.num_columns * 2))
    scale = kind.num_columns**-0.5
    pairs = []
    for _ in range(count):
        weight = torch.randn(kind.num_rows, kind.num_columns, device=DEVICE, dtype=kind.dtype) * scale
        pairs.append(
            (weight, torch.randn(kind.num_rows, device=DEVICE, dtype=kind.dtype) if kind.bias else None)
        )
    return pairs


def measure(kind: GemmShape, pairs: list[tuple[Tensor, Tensor | None]], num_tokens: int) -> dict:
    plan = GemmPlan(kind, num_tokens, DEVICE)
    began = time.perf_counter()
    choice = fastest(plan, pairs)
    searched = time.perf_counter() - began
    x = torch.randn(num_tokens, kind.num_columns, device=DEVICE, dtype=kind.dtype)
    out = torch.zeros(num_tokens, kind.num_rows, device=DEVICE, dtype=kind.out_dtype)

    def pytorchs(weight: Tensor, bias: Tensor | None) -> Tensor:
        return gemm(x, weight, bias, out if kind.residual else None, kind.relu, kind.widened)

    def chosen(weight: Tensor, bias: Tensor | None) -> Tensor:
        if choice == TORCH_DEFAULT:
            return pytorchs(weight, bias)
        plan.run(candidates[choice], x, weight, bias, out)
        return out

    candidates = plan.candidates
    # the chip gets warmer
    turns = [(of, _microseconds(of, pairs)) for of in (pytorchs, chosen, chosen, pytorchs)]
    default_us, chosen_us = (
        statistics.mean(us for algorithm, us in turns if algorithm is of) for of in (pytorchs, chosen)
    )
    exact = x.float() @ pairs[0][0].float().t()
    exact = exact if pairs[0][1] is None else exact + pairs[0][1].float()
    exact = exact.relu() if kind.relu else exact
    errors = []
    for of in (pytorchs, chosen):
        out.zero_()
        errors.append(float((of(*pairs[0]).float() - exact).norm() / exact.norm()))
    reading = 1e6 * kind.num_rows * kind.num_columns * 2 / 4.26e12
    multiplying = 1e6 * 2 * num_tokens * kind.num_rows * kind.num_columns / 740e12
    return {
        "tokens": num_tokens,
        "pytorch_us": round(default_us, 2),
        "chosen_us": round(chosen_us, 2),
        "floor_us": round(max(reading, multiplying), 2),
        "place": choice,
        "candidates": len(candidates),
        "pytorch_error": errors[0],
        "chosen_error": errors[1],
        "search_ms": round(1e3 * searched, 1),
    }


def _microseconds(of: Callable[..., Tensor], pairs: list[tuple[Tensor, Tensor | None]]) -> float:
    def run() -> None:
        for pair in pairs:
            of(*pair)

    return 1e6 * graph_seconds(run) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="llama8b", help="of " + ", ".join(workloads.SHAPES))
    parser.add_argument("--tokens", help="numbers of tokens, with commas; a spread unless told")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one")
    tokens = tuple(map(int, options.tokens.split(","))) if options.tokens else TOKENS
    rows = []
    with torch.inference_mode():
        for shape in options.shapes.split(","):
            for name, kind in kinds_of(shape).items():
                pairs = weights_of(kind)
                for count in tokens:
                    if kind.widened and count > MAX_LOGITS:
                        continue
                    row = {"shape": shape, "matrix": name, **measure(kind, pairs, count)}
                    rows.append(row)
                    print(
                        f"{shape} {name:8} {count:5} tokens  PyTorch {row['pytorch_us']:8.1f} µs  "
                        f"chosen {row['chosen_us']:8.1f} µs ({row['place']:2})  floor {row['floor_us']:8.1f} µs  "
                        f"{row['pytorch_us'] / row['chosen_us']:5.2f} ×",
                        flush=True,
                    )
                del pairs
    if options.output:
        options.output.write_text(json.dumps({**describe_origin(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
