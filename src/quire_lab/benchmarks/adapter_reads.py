"""What reading an adapter from disk costs a thread: `python -m quire_lab.benchmarks.adapter_reads [--output FILE]`.

Adapters of llama8b's shape on q, k, v and o, from files in the page cache, into blocks of 2 MiB in bfloat16: the
thread's own time, the least of a few. `packed_by` is who writes the tiles: plain torch, native code, or numpy, as on a
GPU's host.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from quire.adapters.packing import BlockShape
from quire.adapters.peft import Reader
from quire.adapters.sites import Site, Sites
from quire.bench.machine import describe_machine, describe_versions
from quire.kernels.registry import REFERENCE, alternatives, load
from quire_lab.benchmarks import workloads
from quire_lab.benchmarks.h200_lora import RANKS, write_adapters

SHAPE = "llama8b"
BLOCK = BlockShape(2 << 20, torch.bfloat16, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the threads that read
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), workloads.SHAPES[SHAPE], len(RANKS))
        for name in (REFERENCE, *alternatives("lora_pack")):
            for index, rank in enumerate(RANKS):
                rows.append(_measure(name, rank, Path(folder, f"adapter-{index}"), options.rounds))
                row = rows[-1]
                print(
                    f"{name:10} rank {rank:3}  {row['num_bytes'] / 1e6:6.1f} MB  {row['read_ms']:6.1f} ms, "
                    f"{row['hashed_ms']:6.1f} ms with a hash",
                    flush=True,
                )
    if options.output:
        record = {
            "date": date.today().isoformat(),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "shape": SHAPE,
            "rows": rows,
        }
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")


def _sites() -> Sites:
    shape: dict[str, Any] = workloads.SHAPES[SHAPE]
    hidden = shape["hidden_size"]
    keys = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    widths = {"q": hidden, "k": keys, "v": keys, "o": hidden}
    layers = range(shape["num_hidden_layers"])
    return Sites([
        Site(f"model.layers.{i}.self_attn.{part}_proj", hidden, width)
        for i in layers for part, width in widths.items()
    ])  # fmt: skip


def _measure(name: str, rank: int, folder: Path, rounds: int) -> dict[str, Any]:
    kernel = load("lora_pack", name)
    plain, hashed = (Reader(_sites(), BLOCK, hashed=is_hashed, kernel=kernel) for is_hashed in (False, True))
    packed = plain.read_folder("warm-up", folder)
    return {
        "packed_by": name,
        "rank": rank,
        "num_bytes": packed.num_bytes,
        "read_ms": _least_ms(lambda: plain.read_folder("adapter", folder), rounds),
        "hashed_ms": _least_ms(lambda: hashed.read_folder("adapter", folder), rounds),
    }


def _least_ms(work: Callable[[], object], rounds: int) -> float:
    least = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        work()
        least = min(least, time.thread_time() - began)
    return round(least * 1e3, 2)


if __name__ == "__main__":
    main()
