"""What fewer bits in the KV cache cost and save: KL divergence to 16-bit KV, equal greedy tokens, bytes, decode speed.

usage: python -m quire_lab.benchmarks.kv_quality --text FILE [--contexts 50] [--model M] [--output FILE]

FILE is XQuAD's JSON, of which the first contexts are taken. Each is a prompt: KL and the most likely token are of every
position of it; greedy tokens are those of an answer that each dtype continues by itself.

Weights are of two kinds: full precision, where the KV cache is all that differs, and the device's default. With int8
weights on a CPU activations are rounded to int8 too, and any other KV dtype, a finer one as well, changes how they are
rounded: float32 KV shows how much that is. KL to full precision weights and KV is given beside it.

Speed is of decode steps at long contexts, medians over rounds in which the dtypes take turns.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.engine.build import block_layout
from quire.engine.build.resolve import BuildPlan, make_plan
from quire.engine.build.weights import load_models
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.models.model import DecoderModel
from quire.text.load import load_tokenizer

BASE = "float16"  # the CPU's default, and what others are compared with
DTYPES = ("float32", "bfloat16", "int8")
BLOCK_SIZE = 16
NUM_GREEDY = 48
SPEED_CONTEXTS = (512, 4096)
SPEED_STEPS = 24
ROUNDS = 5


@dataclass(slots=True)
class Divergence:
    """Sums over positions."""

    positions: int = 0
    kl: float = 0.0
    largest_kl: float = 0.0
    same_best: int = 0

    def add(self, base: Tensor, other: Tensor) -> None:
        """[positions, vocabulary] log probabilities."""
        kl = (base.exp() * (base - other)).sum(-1)
        self.positions += len(kl)
        self.kl += float(kl.sum())
        self.largest_kl = max(self.largest_kl, float(kl.max()))
        self.same_best += int((base.argmax(-1) == other.argmax(-1)).sum())

    def record(self) -> dict[str, float]:
        return {
            "mean_kl": self.kl / self.positions,
            "largest_kl": self.largest_kl,
            "same_most_likely": self.same_best / self.positions,
        }


class Scored:
    """A model whose log probabilities are taken with the KV cache in any dtype."""

    def __init__(self, model: str | None, quantization: str) -> None:
        settings = {"model": model} if model else {}
        self.plan: BuildPlan = make_plan(EngineConfig.of(quantization=quantization, **settings))
        self.model: DecoderModel = load_models(self.plan, None).model

    def log_probabilities(self, token_ids: list[int], kv_dtype: str) -> Tensor:
        """[positions, vocabulary], all positions in one prefill."""
        count, device = len(token_ids), self.plan.precision.device
        blocks = -(-count // BLOCK_SIZE)
        precision = replace(self.plan.precision, kv_dtype=kv_dtype)
        pool = Pool(block_layout(BLOCK_SIZE, self.model.config, precision), blocks + 1, device)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        batch = Batch(
            token_ids=torch.tensor(token_ids, **integers),
            positions=torch.arange(count, **integers),
            slots=torch.arange(count, device=device) + BLOCK_SIZE,
            query_starts=torch.tensor([0, count], **integers),
            context_lens=torch.tensor([count], **integers),
            block_tables=torch.arange(1, blocks + 1, **integers)[None],
            logits_indices=torch.arange(count, device=device),
        )
        with torch.inference_mode():
            return self.model.logits(self.model(batch, pool)).float().log_softmax(-1)


def divergences(model: str | None, texts: list[str]) -> dict[str, Any]:
    """By kind of weights and KV dtype."""
    exact, default = Scored(model, "none"), Scored(model, "auto")
    tokenizer = load_tokenizer(exact.plan.source)
    sums: dict[str, dict[str, Divergence]] = {"none": {}, "default": {}, "default, to full precision": {}}
    for text in texts:
        token_ids = tokenizer.encode(text)
        wanted = exact.log_probabilities(token_ids, "float32")
        for name, scored in (("none", exact), ("default", default)):
            base = scored.log_probabilities(token_ids, BASE)
            for dtype in DTYPES:
                other = scored.log_probabilities(token_ids, dtype)
                sums[name].setdefault(dtype, Divergence()).add(base, other)
                if scored is default:
                    to_exact = sums["default, to full precision"]
                    to_exact.setdefault(dtype, Divergence()).add(wanted, other)
            if scored is default:
                sums["default, to full precision"].setdefault(BASE, Divergence()).add(wanted, base)
    return {
        "default_weights": default.plan.precision.format_name,
        "positions": sums["none"]["int8"].positions,
        "weights": {name: {d: total.record() for d, total in rows.items()} for name, rows in sums.items()},
    }


def greedy(model: str | None, texts: list[str]) -> dict[str, Any]:
    """How many greedy tokens are those of 16-bit KV before the first that differs, in full precision."""
    asked = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True)
    answers = {}
    for dtype in (BASE, *DTYPES):
        with LLM(model, quantization="none", kv_cache_dtype=dtype, use_tqdm=False, max_num_seqs=16) as llm:
            answers[dtype] = [list(answer.outputs[0].token_ids) for answer in llm.generate(texts, asked)]
    rows = {}
    for dtype in DTYPES:
        equal = [
            next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), NUM_GREEDY)
            for a, b in zip(answers[BASE], answers[dtype], strict=True)
        ]
        rows[dtype] = {
            "equal_tokens": sum(equal) / (NUM_GREEDY * len(equal)),
            "equal_answers": sum(count == NUM_GREEDY for count in equal),
        }
    return {"answers": len(texts), "tokens_each": NUM_GREEDY, "kv_dtypes": rows}


def tokens_per_gb(model: str | None) -> dict[str, Any]:
    """Of the pool, by dtype; and the ratio to 16 bits for usual heads."""
    plan = make_plan(EngineConfig.of(**({"model": model} if model else {})))
    rows = {}
    for dtype in (BASE, "float32", "int8"):
        layout = block_layout(BLOCK_SIZE, plan.model, replace(plan.precision, kv_dtype=dtype))
        rows[dtype] = {
            "bytes_per_token": layout.bytes_per_token,
            "tokens_per_gb": 10**9 // layout.block_bytes * BLOCK_SIZE,
        }
    ratios = {}
    for head_dim in (64, 80, 96, 128, 256):
        layout = block_layout(BLOCK_SIZE, replace(plan.model, head_dim=head_dim), plan.precision)
        sizes = [replace(layout, dtype=dtype).block_bytes for dtype in (BASE, "int8")]
        ratios[head_dim] = sizes[0] / sizes[1]
    return {"model": rows, "ratio_by_head_dim": ratios}


def speeds(model: str | None) -> dict[str, Any]:
    """Milliseconds of a decode step with one row and with eight, by context and dtype."""
    rows: dict[str, Any] = {}
    for context in SPEED_CONTEXTS:
        for count in (1, 8):
            engines = {
                dtype: LLM(
                    model,
                    kv_cache_dtype=dtype,
                    use_tqdm=False,
                    max_num_batched_tokens=2048,
                    max_num_seqs=count,
                    num_blocks=count * (context // BLOCK_SIZE + 8),
                )
                for dtype in (BASE, "int8")
            }
            for llm in engines.values():
                _step_seconds(llm, count, context)  # prompts are in the prefix cache from here on
            times: dict[str, list[float]] = {dtype: [] for dtype in engines}
            for _ in range(ROUNDS):
                for dtype, llm in engines.items():
                    times[dtype].append(_step_seconds(llm, count, context))
            for llm in engines.values():
                llm.close()
            medians = {dtype: statistics.median(seconds) * 1e3 for dtype, seconds in times.items()}
            name = f"context {context}, {count} rows"
            rows[name] = {"milliseconds": medians, "int8_over_float16": medians["int8"] / medians[BASE]}
            print(name, rows[name], flush=True)
    return rows


def _step_seconds(llm: LLM, count: int, context: int) -> float:
    """The median decode step of `count` rows behind `context` tokens."""
    asked = SamplingParams(temperature=0.0, max_tokens=SPEED_STEPS, ignore_eos=True)
    for row in range(count):
        prompt = [1000 + (row * 7 + position * 13) % 20_000 for position in range(context)]
        llm.engine.add(Request(f"{time.perf_counter()} {row}", prompt, asked))
    seconds = []
    while llm.engine.has_work:
        began = time.perf_counter()
        updates = llm.engine.step()
        if len(updates) == count:  # all rows decode
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--contexts", type=int, default=50)
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--only", choices=("divergence", "greedy", "speed"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/kv_quality.json"))
    options = parser.parse_args()
    articles = json.loads(options.text.read_text())["data"]
    texts = [p["context"] for article in articles for p in article["paragraphs"]][: options.contexts]
    record: dict[str, Any] = {}
    if options.output.exists():
        record = json.loads(options.output.read_text())
    record |= {**describe_origin(), "text": options.text.name, "contexts": len(texts), "kv_16_bits": BASE}
    record["memory"] = tokens_per_gb(options.model)
    parts = {
        "divergence": lambda: divergences(options.model, texts),
        "greedy": lambda: greedy(options.model, texts),
        "speed": lambda: speeds(options.model),
    }
    for name, measure in parts.items():
        if options.only in (None, name):
            record[name] = measure()
            print(json.dumps({name: record[name]}, indent=1), flush=True)
            options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
