"""Adapters on one GPU: `python -m quire_lab.benchmarks.h200_lora --output FILE`, or `h200 lora`.

llama8b with random weights and adapters of ranks 8, 16, 32 and 64 on q, k, v and o; 512 sharegpt requests, greedy, an
adapter drawn at random for each. Cases: `base` (adapters off, a process of its own), `enabled` (adapters on, and no
request has one), `N` (drawn from N adapters), `Nskewed` (by a power law that touches at most 100 of N). A few files are
written, the others are hard links to them; every folder is an adapter of its own to the engine.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire_lab.benchmarks import workloads
from quire_lab.benchmarks.h200 import part_file, take_rows

RANKS = (8, 16, 32, 64)
TOUCHED = 100  # adapters that a skewed case draws from, at most
DEFAULT = (
    "base,base,enabled,100,100,1000,2000skewed"  # a second run finds kernels loaded, and adapters in pages
)


def main(words: list[str] | None = None) -> None:
    options = _options(words)
    if options.child:
        _run(options)
        return
    rows: list[dict[str, Any]] = []
    cases = options.cases.split(",")
    with tempfile.TemporaryDirectory() as folder:
        result, adapters = part_file(options.output, folder), Path(folder, "adapters")
        for some in ([c for c in cases if c == "base"], [c for c in cases if c != "base"]):
            if not some:
                continue
            command = [
                sys.executable,
                "-m",
                "quire_lab.benchmarks.h200_lora",
                "--child",
                "--cases",
                ",".join(some),
                "--output",
                str(result),
            ]
            command += [
                "--shape",
                options.shape,
                "--requests",
                str(options.requests),
                "--settings",
                options.settings,
            ]
            command += ["--adapters", str(adapters), "--length-scale", str(options.length_scale)]
            if some[0] != "base":
                began = time.perf_counter()
                write_adapters(adapters, workloads.SHAPES[options.shape], max(len(RANKS), *map(_count, some)))
                print(f"wrote adapters in {time.perf_counter() - began:.1f} s", flush=True)
            done = subprocess.run([*command, "--began", repr(time.time())], check=False)
            if done.returncode:
                print(f"{some}: ended with {done.returncode}", flush=True)
            rows += take_rows(result)
            if options.output:
                Path(options.output).write_text(json.dumps(rows, indent=1) + "\n")
    _compare(rows)


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=DEFAULT)
    parser.add_argument("--shape", default="llama8b", choices=list(workloads.SHAPES))
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument(
        "--length-scale", type=float, default=1.0, help="of prompts and answers, to try it out"
    )
    parser.add_argument("--settings", default="{}", help="JSON, passed to LLM")
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--adapters", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _count(case: str) -> int:
    """Adapters that there are."""
    digits = case.removesuffix("skewed")
    return int(digits) if digits.isdigit() else 1


def write_adapters(folder: Path, shape: dict[str, Any], count: int) -> None:
    """One file for each rank, hard links for the others, each in a folder of its own."""
    import torch
    from safetensors.torch import save_file

    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    queries, keys = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    widths = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for index in range(count):
        rank = RANKS[index % len(RANKS)]
        target = folder / f"adapter-{index}"
        target.mkdir(parents=True)
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
        settings["target_modules"] = [f"{part}_proj" for part in widths]
        (target / "adapter_config.json").write_text(json.dumps(settings))
        if index >= len(RANKS):
            first = folder / f"adapter-{index % len(RANKS)}" / "adapter_model.safetensors"
            os.link(first, target / "adapter_model.safetensors")
            continue
        tensors = {}
        for layer in range(layers):
            for part, (num_in, num_out) in widths.items():
                name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
                a = torch.randn(rank, num_in, device=device, dtype=torch.bfloat16) * num_in**-0.5
                b = torch.randn(num_out, rank, device=device, dtype=torch.bfloat16) * 0.01
                tensors |= {f"{name}.lora_A.weight": a.cpu(), f"{name}.lora_B.weight": b.cpu()}
        save_file(tensors, target / "adapter_model.safetensors")
    if device == "cuda":
        torch.cuda.empty_cache()


def _run(options: argparse.Namespace) -> None:
    from quire import LLM, SamplingParams

    cases = options.cases.split(",")
    settings = {"enable_prefix_caching": False, **json.loads(options.settings)}
    if set(cases) != {"base"}:
        settings["lora_dir"] = options.adapters
        settings["lora_modules"] = {
            f"adapter-{i}": f"{options.adapters}/adapter-{i}" for i in range(len(RANKS))
        }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(workloads.SHAPES[options.shape]))
        llm = LLM(folder, load_format="dummy", served_model_name=options.shape, use_tqdm=False, **settings)
        single_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        llm.generate([[11, 12, 13]], single_token, use_tqdm=False)
        start_s = time.time() - options.began
        print(*llm.report.lines(), f"first token after {start_s:.1f} s", sep="\n", flush=True)
        rows = []
        for case in cases:
            rows.append({**_run_case(llm, options, case), "start_s": start_s})
            print(json.dumps(rows[-1]), flush=True)
            Path(options.output).write_text(json.dumps(rows))
        llm.engine.check_integrity()
        llm.close()


def _draw(case: str, requests: int) -> list[str | None]:
    """An adapter for each request."""
    rng = random.Random(2)
    if case in ("base", "enabled"):
        return [None] * requests
    count = _count(case)
    if not case.endswith("skewed"):
        return [f"adapter-{rng.randrange(count)}" for _ in range(requests)]
    some = rng.sample(range(count), min(count, TOUCHED))
    weights = [1 / (index + 1) for index in range(len(some))]
    return [f"adapter-{chosen}" for chosen in rng.choices(some, weights, k=requests)]


def _run_case(llm: Any, options: argparse.Namespace, case: str) -> dict[str, Any]:
    from quire import SamplingParams

    scale = options.length_scale
    sizes = [
        (max(1, int(p * scale)), max(1, int(o * scale)))
        for p, o in workloads.lengths("sharegpt", options.requests)
    ]
    prompts = workloads.prompts(sizes, workloads.SHAPES[options.shape]["vocab_size"])
    names = _draw(case, options.requests)
    greedy = SamplingParams(temperature=0, ignore_eos=True, seed=0)
    samplings = [greedy.changed(max_tokens=output) for _, output in sizes]
    warm = [names[0] and "adapter-0", None]
    llm.generate(prompts[:2], greedy.changed(max_tokens=8), use_tqdm=False, adapter=warm)
    engine = llm.engine
    steps, before = engine.stats.num_steps, _stats(engine)
    began = time.perf_counter()
    outputs = llm.generate(prompts, samplings, use_tqdm=False, adapter=names)
    seconds = time.perf_counter() - began
    num_output = sum(len(completion.outputs[0].token_ids) for completion in outputs)
    firsts = sorted(completion.metrics.first_token for completion in outputs)
    after = _stats(engine)
    return {
        "case": case,
        "shape": options.shape,
        "out_tok_s": num_output / seconds,
        "seconds": seconds,
        "num_output": num_output,
        "num_steps": engine.stats.num_steps - steps,
        "distinct_adapters": len({name for name in names if name}),
        "first_token_s": {"median": firsts[len(firsts) // 2], "p99": firsts[int(0.99 * (len(firsts) - 1))]},
        "num_preemptions": engine.scheduler.stats.num_preemptions,
        **{key: after[key] - before[key] for key in after},
    }


def _stats(engine: Any) -> dict[str, float]:
    if engine.adapters is None:
        return {}
    stats = engine.adapters.stats()
    kept = ("num_reads", "num_loads", "num_evictions", "num_uses", "num_failures")
    return {key: getattr(stats, key) for key in kept}


def _compare(rows: list[dict[str, Any]]) -> None:
    by_case = {row["case"]: row for row in rows}
    base = by_case.get("base")
    for row in rows:
        share = f", {row['out_tok_s'] / base['out_tok_s']:.1%} of base" if base else ""
        longer = f" ({row['start_s'] - base['start_s']:+.1f} s)" if base else ""
        print(
            f"{row['case']:12} {row['out_tok_s']:9,.0f} tok/s{share}; {row['distinct_adapters']} adapters, "
            f"start {row['start_s']:.1f} s{longer}, first token {row['first_token_s']['median']:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
