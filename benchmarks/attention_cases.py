"""Ragged batches over pages, their float64 reference, and timing by graph replays, for `attention_gpu.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention.triton import AttentionPlanner, AttentionTuning
from quire.kernels.timing import graph_seconds

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
class Case:
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
) -> Case:
    """Random requests over shuffled blocks; with `poison`, slots that nobody may read hold not-a-numbers."""
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
    return Case(heads, q, pool, starts, lengths, tables, contexts, queries)


def reference(case: Case, window: int = 0, contexts: list[int] | None = None) -> Tensor:
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
