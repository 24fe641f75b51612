"""Attention's kernels against float64: ragged batches and trees, of usual and of wide heads.

`attention_gpu.py --sections check` runs these on a GPU. Without one, in Triton's interpreter, with short contexts:

    TRITON_INTERPRET=1 PYTHONPATH=src python -m quire_lab.benchmarks.attention_checks
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.draft import ancestors, depths
from quire.core.request import ints
from quire.kernels.attention import reference as plain
from quire.kernels.attention import triton as attention
from quire.kernels.attention.triton import AttentionPlanner, AttentionTuning
from quire.kernels.measurement import graph_seconds

# Ragged batches over pages, their float64 reference, and timing by graph replays, for `attention_gpu.py`.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's interpreter checks the script
READ_CEILING = 4.26e12  # bytes per second, measured
REPORT: dict[str, list[dict[str, Any]]] = {}


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer and the size of a block."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    def token_bytes(self) -> int:
        """K and V of one position in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A ragged batch over a page-major pool of several layers."""

    heads: Heads
    q: Tensor  # [T, Hq, D]
    pool: Tensor  # [num_blocks, layers, 2, block_size, Hkv, D]
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    contexts: list[int]
    queries: list[int]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pool[:, layer, 0], self.pool[:, layer, 1]

    def arguments(self, layer: int) -> tuple[Any, ...]:
        scale = self.heads.head_dim**-0.5
        return (self.q, *self.pages(layer), self.query_starts, self.context_lens, self.block_tables, scale)

    def planner(self, tuning: AttentionTuning | None = None, deterministic: bool = False) -> AttentionPlanner:
        return AttentionPlanner(
            len(self.contexts), self.heads.num_heads, self.heads.kv_heads, self.heads.head_dim, DEVICE,
            max_tokens=self.q.shape[0], max_context=max(self.contexts),
            dtype=self.heads.dtype, deterministic=deterministic, tuning=tuning,
        )  # fmt: skip


def label(tuning: AttentionTuning) -> str:
    """What is set, in words."""
    words = f"tile {tuning.decode_tile} warps {tuning.decode_warps} stages {tuning.decode_stages}"
    words += f" pieces {tuning.decode_pieces} regs {tuning.decode_registers or '-'}"
    return words if tuning.fused_reduction else words + " unfused"


def make_case(
    heads: Heads, contexts: list[int], queries: list[int], layers: int = 1, poison: bool = False
) -> AttentionCase:
    """Random requests over shuffled blocks; with `poison`, slots that no kernel may read hold NaN."""
    counts = [-(-context // heads.block_size) for context in contexts]
    order = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32) + 1
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32, device=DEVICE)
    shape = (sum(counts) + 1, layers, 2, heads.block_size, heads.kv_heads, heads.head_dim)
    if poison:
        pool = torch.full(shape, float("nan"), dtype=heads.dtype, device=DEVICE)
    else:
        pool = torch.empty(shape, dtype=heads.dtype, device=DEVICE).normal_()
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start : start + count]
        start += count
        if poison:
            positions = torch.arange(contexts[row], device=DEVICE)
            blocks = tables[row].long()[positions // heads.block_size]
            content = torch.randn(contexts[row], *shape[1:3], *shape[4:], device=DEVICE).to(heads.dtype)
            pool[blocks, :, :, positions % heads.block_size] = content
    starts = torch.tensor([0, *queries], device=DEVICE).cumsum(0).int()
    q = torch.randn(sum(queries), heads.num_heads, heads.head_dim, device=DEVICE).to(heads.dtype) * 2
    lengths = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    return AttentionCase(heads, q, pool, starts, lengths, tables, contexts, queries)


def reference(case: AttentionCase, window: int = 0, contexts: list[int] | None = None) -> Tensor:
    """The same attention in float64, one row after another."""
    heads, k_pages, v_pages = case.heads, *case.pages(0)
    out, start = torch.zeros(case.q.shape[0], heads.num_heads * heads.head_dim, device=DEVICE).double(), 0
    for row, (context, count) in enumerate(zip(contexts or case.contexts, case.queries, strict=True)):
        positions = torch.arange(context, device=DEVICE)
        at = (case.block_tables[row].long()[positions // heads.block_size], positions % heads.block_size)
        k, v = (pages[at].double().repeat_interleave(heads.group, 1) for pages in (k_pages, v_pages))
        scores = (
            torch.einsum("qhd,khd->hqk", case.q[start : start + count].double(), k) * heads.head_dim**-0.5
        )
        query = positions[context - count :, None]
        hidden = positions[None, :] > query
        if window:
            hidden |= positions[None, :] <= query - window
        result = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        out[start : start + count] = result.reshape(count, -1)
        start += count
    return out


def error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; not-a-number never passes."""
    return float((actual.double() - expected).norm() / expected.norm())


def record(section: str, **numbers: Any) -> None:
    REPORT.setdefault(section, []).append(numbers)
    shown = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in numbers.items()
    )
    print(f"[{section}] " + "  ".join(shown), flush=True)


def graph_time(run: Callable[[], object], calls: int = 1, seconds: float = 0.15) -> float:
    """Seconds per call of what `run` launches (`calls` of them), as a replayed graph."""
    return graph_seconds(run, seconds) / calls


LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
VARIANTS: dict[str, tuple[AttentionTuning, bool]] = {
    "default": (AttentionTuning(), False),
    "unfused": (AttentionTuning(fused_reduction=False), False),
    "deterministic": (AttentionTuning(), True),
}
USUAL = [
    Heads(), Heads(3, 3, 64), Heads(2, 8, 80, 1), Heads(4, 1, 96, 128, torch.float16),
    Heads(2, 4, 64, 16, torch.float32),
]  # fmt: skip
WIDE = [Heads(2, group, size, block) for group, size in ((4, 192), (2, 256)) for block in (16, 1)]
CONTEXTS = [1, 70, 5, 1300, 64, 4000, 900, 33, 2048, 17]
QUERIES = [1, 1, 5, 400, 3, 1, 1, 33, 300, 2]
PARENTS = ints([-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10])  # three branches of four


def check_batches(shapes: list[Heads], contexts: list[int], queries: list[int]) -> None:
    """Prompts, chunks behind a prefix and decodes in one batch, with and without a window."""
    for heads in shapes:
        case = make_case(heads, contexts, queries, poison=True)
        for window in (0, 100):
            expected = reference(case, window)
            for name, (tuning, deterministic) in VARIANTS.items():
                plan = case.planner(tuning, deterministic).plan(
                    case.query_starts, case.context_lens, len(contexts), window=window
                )
                out = torch.full_like(expected, float("nan"), dtype=heads.dtype)
                attention.paged_attention(*case.arguments(0), window, out, plan=plan)
                _note(case, name, error(out, expected), window=window)


def check_trees(shapes: list[Heads], contexts: list[int]) -> None:
    """A tree at the end of each of these contexts, beside a decode and a chunk."""
    count = len(PARENTS) + 1
    for heads in shapes:
        case = make_case(heads, [*contexts, 90, 65], [count] * len(contexts) + [1, 40])
        starts, seen, positions = [], [], []
        for context, queries in zip(case.contexts, case.queries, strict=True):
            if queries != count:
                starts, seen = starts + [-1] * queries, seen + [0] * queries
                positions += range(context - queries, context)
                continue
            base = context - len(PARENTS)
            starts, seen = starts + [base] * count, [*seen, 0, *ancestors(PARENTS)]
            positions += [base - 1, *(base + depth for depth in depths(PARENTS))]
        masks = (
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(seen, dtype=torch.int64, device=DEVICE),
        )
        q, *where = case.arguments(0)
        exact = [part.float() for part in (q, *where[:2])]
        expected = plain.paged_attention(*exact, *where[2:], 0, None, *masks).double()
        for name in ("default", "deterministic"):
            output = attention.paged_attention(
                *case.arguments(0), 0, None, *masks, torch.tensor(positions, dtype=torch.int32, device=DEVICE),
                deterministic=name == "deterministic",
            )  # fmt: skip
            _note(case, name, error(output, expected), trees=len(contexts))


def _note(case: AttentionCase, variant: str, found: float, **more: int) -> None:
    heads = case.heads
    what = f"{heads.kv_heads}x{heads.group}x{heads.head_dim} block {heads.block_size} {str(heads.dtype)[6:]}"
    record("check", what=what, **more, variant=variant, error=found, ok=found < LIMITS[heads.dtype])


def main() -> None:
    """The wide heads, as far as the interpreter comes in a minute."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    check_batches(WIDE, [1, 70, 150], [1, 1, 40])
    check_trees(WIDE, [60])
    sys.exit(sum(not line["ok"] for line in REPORT["check"]))


if __name__ == "__main__":
    main()
