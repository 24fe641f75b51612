"""Swapping on a GPU: bandwidth through the runner's own code, and the same tokens however requests leave the pool.

    PYTHONPATH=src python -m quire_lab.benchmarks.swap_gpu [--device cuda] [--blocks 1024] [--output FILE]

Bandwidth: llama8b's blocks of 16 tokens (2 MiB), out to pinned memory and back, in random order and in a row, checked
byte for byte; then out and back beside matrix products, to see what either costs the other. Tokens: a small model of
llama's shape with random weights, `deterministic`, in a pool of a quarter of the demand in all three modes. Needs
torch, triton and numpy only; with `--device cpu --blocks 8` it shows itself on a CPU.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.core.layout import BlockLayout
from quire.core.request import ints
from quire.core.step import HostTransfers, Step
from quire.layers.attention import Pool
from quire.runner.transfer import TransferEngine

LLAMA8B = BlockLayout(num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
LINK_GB_PER_S = 55.0
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def moving_step(out: list[tuple[int, int]], back: list[tuple[int, int]]) -> Step:
    """A step that only moves pages: (block, host) pairs that leave and that return."""
    moves = HostTransfers(
        ints(b for b, _ in out), ints(h for _, h in out), ints(h for _, h in back), ints(b for b, _ in back)
    )
    none = ints()
    return Step(0, (), none, none, none, none, none, none, none, none, none, none, moves=moves)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Any) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def bandwidth(device: torch.device, num_blocks: int) -> dict[str, Any]:
    pool = Pool(LLAMA8B, num_blocks + 1, device)
    started = time.perf_counter()
    mover = TransferEngine(pool, num_blocks)
    for host in range(1, num_blocks + 1, mover.arena.chunk_blocks):
        mover.arena.blocks(host)
    pinned_s = time.perf_counter() - started
    size = num_blocks * LLAMA8B.block_bytes
    chosen = random.Random(0)
    record: dict[str, Any] = {
        "block_bytes": LLAMA8B.block_bytes,
        "blocks": num_blocks,
        "pinning_s": round(pinned_s, 2),
    }
    content = pool.data[1:]
    for order in ("in a row", "random"):
        blocks, hosts = list(range(1, num_blocks + 1)), list(range(1, num_blocks + 1))
        if order == "random":
            chosen.shuffle(blocks)
            chosen.shuffle(hosts)
        pairs = list(zip(blocks, hosts, strict=True))
        content.random_(0, 256)
        wanted = content.sum(dtype=torch.int64).item(), content[:, ::4097].clone()
        out_s = min(timed(device, lambda p=pairs: mover.move(moving_step(p, []))) for _ in range(3))
        content.zero_()
        in_s = min(timed(device, lambda p=pairs: mover.move(moving_step([], p))) for _ in range(3))
        if content.sum(dtype=torch.int64).item() != wanted[0] or not content[:, ::4097].equal(wanted[1]):
            raise SystemExit(f"{order}: what came back is not what left")
        record[f"out, {order}, GB/s"] = round(size / out_s / 1e9, 1)
        record[f"back, {order}, GB/s"] = round(size / in_s / 1e9, 1)
    slowest = min(value for key, value in record.items() if key.endswith("GB/s"))
    record["share of the link"] = round(slowest / LINK_GB_PER_S, 3)
    record["moved_block_us"] = round(1e6 * mover.block_seconds(), 1)
    if device.type == "cuda":
        record["overlap"] = overlap(device, mover, pairs)
    return record


def overlap(device: torch.device, mover: TransferEngine, pairs: list[tuple[int, int]]) -> dict[str, float]:
    """Matrix products alone, a swap alone, and both at once. The host queues the swap first, as a runner does."""
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))

    def compute() -> None:
        for _ in range(40):
            torch.mm(left, right)

    def both() -> None:
        mover.move(moving_step(pairs, []))
        compute()

    compute()
    alone = min(timed(device, compute) for _ in range(3))
    swap = min(timed(device, lambda: mover.move(moving_step(pairs, []))) for _ in range(3))
    together = min(timed(device, both) for _ in range(3))
    return {"compute_ms": 1e3 * alone, "swap_ms": 1e3 * swap, "both_ms": 1e3 * together}


def same_tokens(device: torch.device) -> dict[str, Any]:
    chosen = random.Random(2)
    lengths = [chosen.randint(20, 400) for _ in range(32)]
    prompts = [{"prompt_token_ids": [chosen.randrange(3, 4096) for _ in range(n)]} for n in lengths]
    samplings = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=96, ignore_eos=True, n=2 if i % 8 == 0 else 1)
        for i in range(len(prompts))
    ]
    demand = sum(-(-(n + 96) // 16) for n in lengths)
    by_mode: dict[str, Any] = {}
    wanted = None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL))
        for name, num_blocks, mode in (
            ("large pool", 3 * demand, "auto"),
            *((mode, demand // 4, mode) for mode in ("recompute", "swap", "auto")),
        ):
            llm = LLM(
                folder, load_format="dummy", use_tqdm=False, deterministic=True, device=device.type, swap_space=0.5,
                num_blocks=num_blocks, preemption_mode=mode, max_model_len=1024, max_num_seqs=64,
            )  # fmt: skip
            with llm:
                started = time.perf_counter()
                results = llm.generate(prompts, samplings, use_tqdm=False)
                seconds = time.perf_counter() - started
                llm.engine.check_integrity()
                stats = llm.engine.scheduler.stats
                tokens = [[list(output.token_ids) for output in result.outputs] for result in results]
            wanted = tokens if wanted is None else wanted
            by_mode[name] = {
                "same": tokens == wanted, "seconds": round(seconds, 3), "preemptions": stats.num_preemptions,
                "swaps": stats.num_swaps_out, "blocks": num_blocks,
            }  # fmt: skip
            print(name, json.dumps(by_mode[name]), flush=True)
    return by_mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one, or try the script itself with --device cpu")
    device = torch.device(options.device)
    result: dict[str, Any] = {
        **describe_origin(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "bandwidth": bandwidth(device, options.blocks),
    }
    print(json.dumps(result, indent=1), flush=True)
    result["tokens"] = same_tokens(device)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if not all(mode["same"] for mode in result["tokens"].values()):
        raise SystemExit("some mode gave other tokens")


if __name__ == "__main__":
    main()
