"""Thousands of adapters on a CPU: `python -m quire_lab.benchmarks.lora_cpu --output FILE`.

The built-in model with 2,000 random adapters on disk (ranks 4 to 64 on q, k, v and o; `--files 2000` writes 11 GB),
requests drawn from them by a power law, `--running` at a time; the same requests without adapters before and after, in
the same process, so that a machine that is busy with other things is seen. Prints throughput, its share of the base's,
and the process's resident memory.
"""

import argparse
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_origin

RANKS = (4, 8, 16, 32, 64)
LAYERS, HIDDEN, KEYS = 30, 576, 192  # of the built-in model
WIDTHS = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, KEYS), "v": (HIDDEN, KEYS), "o": (HIDDEN, HIDDEN)}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        found = _run(options, Path(options.folder or folder))
    found = {**describe_origin(), **found}
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--running", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument(
        "--exponent", type=float, default=1.0, help="of the power law: adapter i is drawn as i**-x"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--host-mb", type=int, default=256, help="host memory for adapters")
    parser.add_argument("--pool-mb", type=int, default=768, help="the pool, for K and V and adapters")
    parser.add_argument(
        "--files", type=int, default=400, help="that differ; the other adapters are hard links"
    )
    parser.add_argument("--folder", help="keep the adapters here and use them again")
    parser.add_argument("--output", help="JSON file")
    return parser.parse_args()


def write_adapters(folder: Path, count: int, num_files: int) -> None:
    """Half-precision files. One random line serves all of them, each from another place on: quick, and all differ."""
    import torch
    from safetensors.torch import save_file

    longest = max(RANKS) * HIDDEN
    noise = torch.randn(longest + 4 * count * LAYERS + 4096, dtype=torch.float32).to(torch.bfloat16)
    for index in range(count):
        target = folder / f"adapter-{index}"
        if (target / "adapter_config.json").exists():
            continue
        target.mkdir(parents=True)
        rank = RANKS[index % num_files % len(RANKS)]
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        config["target_modules"] = [f"{part}_proj" for part in WIDTHS]
        (target / "adapter_config.json").write_text(json.dumps(config))
        if index >= num_files:
            first = folder / f"adapter-{index % num_files}" / "adapter_model.safetensors"
            os.link(first, target / "adapter_model.safetensors")
            continue
        tensors = {}
        for layer in range(LAYERS):
            for position, (part, (num_in, num_out)) in enumerate(WIDTHS.items()):
                first = 4 * (index * LAYERS + layer) + position
                name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
                a, b = noise[first : first + rank * num_in], noise[first + 4 : first + 4 + num_out * rank]
                tensors[f"{name}.lora_A.weight"] = (a * num_in**-0.5).view(rank, num_in)
                tensors[f"{name}.lora_B.weight"] = (b * 0.02).view(num_out, rank)
        save_file(tensors, target / "adapter_model.safetensors")


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from quire import LLM

    began = time.perf_counter()
    write_adapters(folder, options.adapters, options.files)
    written = time.perf_counter() - began
    began = time.perf_counter()
    llm = LLM(
        use_tqdm=False,
        max_num_seqs=options.running,
        max_model_len=2048,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=options.pool_mb << 20,
        lora_dir=str(folder),
        max_cpu_lora_bytes=options.host_mb << 20,
    )
    start = time.perf_counter() - began
    rng = random.Random(0)
    weights = [(i + 1) ** -options.exponent for i in range(options.adapters)]
    drawn = rng.choices(range(options.adapters), weights, k=options.requests)
    names: list[str | None] = [f"adapter-{i}" for i in drawn]
    prompts = [[rng.randrange(100, 40_000) for _ in range(options.prompt)] for _ in range(options.requests)]
    _case(llm, options, prompts[:8], [None] * len(prompts[:8]))
    before = _resident_mb()
    runs = []
    for _ in range(options.repeats):
        base = _case(llm, options, prompts, [None] * len(prompts))
        adapted = _case(llm, options, prompts, names)
        runs.append({"base_tok_s": base, "adapters_tok_s": adapted, "share": adapted / base})
    base = _case(llm, options, prompts, [None] * len(prompts))
    engine = llm.engine
    engine.check_integrity()
    stats, pages = engine.adapters.stats(), engine.memory.adapter_pages
    record = {
        "adapters": options.adapters,
        "files": min(options.files, options.adapters),
        "distinct": len(set(drawn)),
        "running": options.running,
        "runs": runs,
        "base_at_the_end_tok_s": base,
        "share": sorted(run["share"] for run in runs)[len(runs) // 2],
        "start_s": start,
        "written_s": written,
        "resident_mb": {"before": before, "after": _resident_mb(), "peak": _peak_mb()},
        "limits_mb": {"pool": options.pool_mb, "host": options.host_mb},
        "reads": stats.num_reads,
        "loads": stats.num_loads,
        "evictions": stats.num_evictions,
        "uses": stats.num_uses,
        "pool_blocks": {"adapters": pages.num_blocks, "all": engine.memory.num_blocks},
    }
    llm.close()
    return record


def _case(llm: Any, options: argparse.Namespace, prompts: list[list[int]], names: list[str | None]) -> float:
    from quire import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=options.answer, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False, adapter=names)
    seconds = time.perf_counter() - began
    return sum(len(one.outputs[0].token_ids) for one in outputs) / seconds


def _resident_mb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    return 0


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
