"""What it costs to let a sequence go and bring it back: its blocks moved out and in, or its tokens computed again."""

import random
import time
from dataclasses import dataclass

import torch

from quire.bench.drive import Bench
from quire.bench.lengths import Lengths
from quire.core.ints import Ints, ints
from quire.core.step import HostTransfers, Step
from quire.engine.build import block_layout
from quire.layers.pool import Pool
from quire.runner.transfer import TransferEngine


@dataclass(frozen=True, slots=True)
class Return:
    """Of one sequence, seconds: the least of many."""

    block_size: int
    num_tokens: int
    swap: float  # out and in
    recompute: float
    num_bytes: int  # of its blocks, one way


def measure_return(bench: Bench, num_tokens: int, repeats: int, seed: int) -> Return:
    """A pool of twice its size, its blocks anywhere in it; recomputing is a prompt of that length."""
    numbers, block_size = bench.built.report.precision, bench.built.report.pool.block_size
    layout = block_layout(block_size, bench.built.model, numbers)
    count = -(-num_tokens // block_size)
    pool = Pool(layout, 2 * count + 1, numbers.device)
    mover = TransferEngine(pool, count)
    source = random.Random(seed)
    blocks = ints(source.sample(range(1, 2 * count + 1), count))
    hosts = ints(range(1, count + 1))
    swap = min(_swap(mover, blocks, hosts, numbers.device) for _ in range(repeats + 1))
    recompute = min(bench.serve(bench.requests([Lengths(num_tokens, 1)])).seconds for _ in range(repeats))
    return Return(block_size, num_tokens, swap, recompute, count * layout.block_bytes)


def _swap(mover: TransferEngine, blocks: Ints, hosts: Ints, device: torch.device) -> float:
    nobody = ints()
    started = time.perf_counter()
    mover.move(_moving(HostTransfers(blocks, hosts, nobody, nobody)))
    mover.move(_moving(HostTransfers(nobody, nobody, hosts, blocks)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _moving(moves: HostTransfers) -> Step:
    """A step in which nobody advances."""
    none = ints()
    return Step(0, (), none, none, none, none, none, none, none, none, none, none, moves=moves)
