"""`flash`: attention forward and backward, with whole matrices and in tiles: time, bytes kept, sparse blocks."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import registry
from quire.kernels.packed_attention.reference import BLOCK
from quire_lab.measure.compare import interleave
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.interval import Ratio

# FlashAttention's table: GPT-2 medium on an A100, forward and backward
PUBLISHED = {"plain GB": 40.3, "tiled GB": 4.4, "plain ms": 41.7, "tiled ms": 7.3}
PAPER_SHAPE = (64, 16, 1024, 64)  # batch, heads, tokens, head size
DENSITIES = (1.0, 0.5, 0.25, 0.1)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    length: int
    way: str
    seconds: float  # forward and backward
    kept_bytes: int  # between them


def run(setup: Setup) -> Finding:
    device, dtype = placed(str(setup.engine.get("device")))
    lengths = setup.pick((64, 128), (512, 1024, 2048), (1024, 2048, 4096, 8192))
    heads, width = setup.pick(2, 8, 16), 64
    passes, ratios = [], []
    for length in lengths:
        drawn = torch.randn(3, 1, heads, length, width, device=device, dtype=dtype)
        ways = {
            name: partial(_measured, length, name, way, drawn)
            for name, way in (("plain", plain), ("tiled", tiled))
        }
        for warm_up in ways.values():
            warm_up()
        pairs = interleave(setup, ways, _seconds, f"{length} tokens", share=0.9 / len(lengths))
        passes += [min(runs, key=_seconds) for runs in pairs.runs.values()]
        ratios.append(pairs.ratio("plain", "tiled", _seconds))
    sparse = _sparse(device, setup.pick(4 * BLOCK, 16 * BLOCK, 64 * BLOCK), heads)
    shape = {
        "heads": heads,
        "head_dim": width,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return _finding(passes, ratios, sparse, shape)


def placed(asked: str) -> tuple[torch.device, torch.dtype]:
    """A GPU where there is one and the CPU is not asked for, in the format that attention trains in there."""
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu"), torch.float32
    return torch.device("cuda"), torch.bfloat16


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores and probabilities as whole matrices."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _seconds(one: Pass) -> float:
    return one.seconds


def _measured(length: int, way: str, attention: Attention, drawn: Tensor) -> Pass:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v = (x.clone().requires_grad_() for x in drawn)
    _wait(drawn)
    started = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attention(q, k, v)
    out.backward(out.detach())
    _wait(drawn)
    seconds = time.perf_counter() - started
    inputs = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    return Pass(length, way, seconds, sum(size for at, size in kept.items() if at not in inputs))


def _wait(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()


def _sparse(device: torch.device, length: int, heads: int) -> list[dict[str, float]]:
    """Shares of blocks that are computed; on a GPU also the time of the Triton kernel's forward and backward pass."""
    blocks = length // BLOCK
    causal = torch.ones(blocks, blocks, dtype=torch.bool).tril()
    results = []
    for density in DENSITIES:
        drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < density
        mask = (drawn | torch.eye(blocks, dtype=torch.bool)) & causal
        entry = {"density": density, "share": float(mask.sum() / causal.sum())}
        if device.type == "cuda":
            entry["seconds"] = _sparse_seconds(mask, length, heads, device)
        results.append(entry)
    return results


def _sparse_seconds(mask: Tensor, length: int, heads: int, device: torch.device) -> float:
    kernel: Any = registry.choose("packed_attention", device)
    q, k, v = torch.randn(3, length, heads, 64, device=device, dtype=torch.bfloat16)
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    given = (starts, length, 0.125, mask.to(device=device, dtype=torch.uint8))
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        out, sums = kernel.forward(q, k, v, *given)
        kernel.backward(out, q, k, v, out, sums, *given)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def traffic(batch: int, heads: int, length: int, width: int) -> tuple[float, float]:
    """Bytes of 16 bits that forward and backward move, (plain, tiled): matrices of scores are read and written eight
    times, and in tiles not at all."""
    scores, inputs = batch * heads * length * length, batch * heads * length * width
    return 2.0 * (8 * scores + 14 * inputs), 2.0 * 16 * inputs


def _finding(
    passes: list[Pass], ratios: list[Ratio], sparse: list[dict[str, float]], shape: dict[str, Any]
) -> Finding:
    by = {(entry.length, entry.way): entry for entry in passes}
    lengths = sorted({entry.length for entry in passes})
    rows = []
    for length, ratio in zip(lengths, ratios, strict=True):
        whole, tiles = by[length, "plain"], by[length, "tiled"]
        rows.append(
            [f"{length:,}", f"{1e3 * whole.seconds:.1f}", f"{1e3 * tiles.seconds:.1f}",
             ratio.text(), f"{whole.kept_bytes / 1e6:.2f}", f"{tiles.kept_bytes / 1e6:.2f}",
             f"{whole.kept_bytes / tiles.kept_bytes:.1f}"]
        )  # fmt: skip
    head = ["tokens", "plain ms, best", "tiled ms, best", "ratio", "plain MB kept", "tiled MB kept", "ratio"]
    moved = traffic(*PAPER_SHAPE)
    growth = [by[lengths[-1], way].kept_bytes / by[lengths[0], way].kept_bytes for way in ("plain", "tiled")]
    times = lengths[-1] / lengths[0]
    shares = [
        [
            f"{entry['density']:.2f}",
            f"{entry['share']:.2f}",
            f"{1e3 * entry['seconds']:.2f}" if "seconds" in entry else "–",
        ]
        for entry in sparse
    ]
    return Finding(
        f"With {lengths[-1]:,} tokens, attention in tiles keeps "
        f"{by[lengths[-1], 'plain'].kept_bytes / by[lengths[-1], 'tiled'].kept_bytes:.0f} times less for the backward "
        f"pass; whole matrices over tiles, both passes: {ratios[-1].claim('times the time')}.",
        [
            Table("Forward and backward, {heads} heads of {head_dim}, {dtype} on {device}".format(**shape), head, rows),
            Table("Block-sparse", ["density", "share of blocks", "ms"], shares),
        ],
        [],
        {"passes": [asdict(entry) for entry in passes], "ratios": [ratio.record() for ratio in ratios],
         "sparse": sparse, "published": PUBLISHED,
         "paper_traffic_bytes": {"plain": moved[0], "tiled": moved[1]}},
        shape,
        [
            Check("plain keeps bytes by the square of the length", f"{growth[0]:.1f}", growth[0] > 0.8 * times**2),
            Check("tiles keep bytes in proportion", f"{growth[1]:.1f}", growth[1] < 1.2 * times),
        ],
        [
            f"published, GPT-2 medium on an A100: {PUBLISHED['plain GB']} and {PUBLISHED['tiled GB']} GB of traffic "
            f"({PUBLISHED['plain GB'] / PUBLISHED['tiled GB']:.1f} times), {PUBLISHED['plain ms']} and "
            f"{PUBLISHED['tiled ms']} ms ({PUBLISHED['plain ms'] / PUBLISHED['tiled ms']:.1f} times); its shape needs "
            f"at least {moved[0] / 1e9:.1f} and {moved[1] / 1e9:.1f} GB",
            "tiled: torch's scaled_dot_product_attention; block-sparse: the Triton kernel, timed on a GPU only",
        ],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "flash",
    "Attention in tiles",
    "Training needs attention's gradients. What does it cost to keep whole matrices of scores, and what to compute "
    "them again?",
    run,
)
