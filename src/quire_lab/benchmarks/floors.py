"""What one H200 could do at best on the shared workloads. Needs no GPU.

    python -m quire_lab.benchmarks.floors [--output FILE]

A roofline without overhead. Prompts are multiplied at the rate of the matrix units, all requests at once. Then come
decode steps, each of which reads the weights and the contexts of the requests that still run, or multiplies, whichever
takes longer. Nothing is started, nothing waits, sampling and norms are free. `--beside h200.json` prints measured rows
with the share of the floor that they reach.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_origin
from quire_lab.benchmarks import workloads

BYTES_PER_SECOND = 4.26e12  # read from memory, measured
FLOPS = 700e12  # bf16 products, measured
BYTES = 2  # of a weight and of an element of KV


@dataclass(frozen=True, slots=True)
class Counted:
    """What a shape reads and multiplies."""

    layers: int  # elements of the layers' matrices, without experts
    head: int  # elements of the output head
    kv: int  # elements of keys and values per token
    scores: int  # multiplications per query and position, keys and values together
    expert: int = 0  # elements of one expert of every layer
    num_experts: int = 1
    top_k: int = 0  # experts that a token goes through

    @classmethod
    def of(cls, shape: dict[str, Any]) -> "Counted":
        hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
        kv_heads = shape.get("num_key_value_heads", heads)
        head_dim = shape.get("head_dim", hidden // heads)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        layers, num_experts = shape["num_hidden_layers"], shape.get("num_experts", 0)
        if num_experts:
            wide = hidden * num_experts  # the router
        elif "ffn_dim" in shape:
            wide = 2 * hidden * shape["ffn_dim"]
        else:
            wide = 3 * hidden * shape["intermediate_size"]
        return cls(
            layers * (attention + wide),
            hidden * shape["vocab_size"],
            2 * layers * kv_heads * head_dim,
            2 * layers * heads * head_dim,
            3 * layers * hidden * shape["moe_intermediate_size"] if num_experts else 0,
            num_experts or 1,
            shape["num_experts_per_tok"] if num_experts else 0,
        )

    def num_read_experts(self, num_tokens: int) -> float:
        """Experts of a layer that some token goes through, if all are equally likely."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


def prompt_seconds(counted: Counted, prompts: list[int]) -> float:
    """Every token through the layers and causal attention, the last one of each through the head."""
    layers = counted.layers + counted.expert * counted.top_k
    products = sum(layers * n + counted.head + counted.scores * n * (n + 1) // 2 for n in prompts)
    return 2 * products / FLOPS


def decode_seconds(counted: Counted, contexts: list[int]) -> float:
    """One token of each request. The weights are read once; a context is read, and its scores are computed beside."""
    weights = counted.layers + counted.head
    read = weights + counted.expert * counted.num_read_experts(len(contexts))
    multiplied = weights + counted.expert * counted.top_k
    products = max(BYTES * read / BYTES_PER_SECOND, 2 * multiplied * len(contexts) / FLOPS)
    return products + BYTES * counted.kv * sum(contexts) / BYTES_PER_SECOND


def floor(shape: str, case: str) -> dict[str, Any]:
    counted = Counted.of(workloads.SHAPES[shape])
    sizes = workloads.lengths(*workloads.CASES[case])
    prompts = prompt_seconds(counted, [prompt for prompt, _ in sizes])
    decodes, num_steps = 0.0, max(output for _, output in sizes)
    for step in range(1, num_steps):
        decodes += decode_seconds(counted, [prompt + step for prompt, output in sizes if output > step])
    seconds = prompts + decodes
    return {
        "shape": shape,
        "case": case,
        "seconds": seconds,
        "prompt_seconds": prompts,
        "out_tok_s": sum(output for _, output in sizes) / seconds,
        "prompt_tok_s": sum(prompt for prompt, _ in sizes) / seconds,
        "ms_per_step": 1e3 * decodes / (num_steps - 1) if num_steps > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--beside", help="a file of quire_lab.benchmarks.h200")
    options = parser.parse_args()
    if options.beside and not Path(options.beside).is_file():
        parser.error(
            f"--beside {options.beside}: there is no such file; quire_lab.benchmarks.h200 --output writes one"
        )
    rows = [floor(shape, case) for shape, cases in workloads.ROWS.items() for case in cases]
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    if options.beside:
        beside = json.loads(Path(options.beside).read_text())
        measured = {(row["shape"], row["case"]): row for row in beside}
    for row in rows:
        kind = "prompt_tok_s" if row["case"] == "prefill" else "out_tok_s"
        ours = measured.get((row["shape"], row["case"]))
        share = f"  measured {ours[kind]:10,.0f}, {ours[kind] / row[kind]:4.0%}" if ours else ""
        step = f"{row['ms_per_step']:7.3f} ms/step" if row["ms_per_step"] else " " * 15
        print(f"{row['shape']:13} {row['case']:9} {row[kind]:10,.0f} tok/s {step}{share}")
    if options.output:
        facts = {"bytes_per_second": BYTES_PER_SECOND, "flops": FLOPS}
        Path(options.output).write_text(
            json.dumps({**describe_origin(), "assumed": facts, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
