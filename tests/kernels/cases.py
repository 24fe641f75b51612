"""Inputs for the kernel tests: paged requests with garbage wherever nothing may be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.layout import BlockLayout
from quire.kernels import native
from quire.kernels.rotary.reference import quantize
from quire.layers.attention import Pool


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A ragged batch over pages; `contexts` are context lengths, `queries` how many of the last are asked."""

    q: Tensor  # [T, Hq, D]
    k_pages: Tensor  # [num_blocks, block_size, Hkv, D]
    v_pages: Tensor
    query_starts: Tensor  # [R + 1]
    context_lens: Tensor  # [R]
    block_tables: Tensor  # [R, max_blocks]
    scale: float
    # k_scales and v_scales [num_blocks, Hkv, block_size] of pages in int8, or empty
    scales: dict[str, Tensor]

    def arguments(self, window: int = 0) -> tuple[object, ...]:
        return (
            self.q, self.k_pages, self.v_pages, self.query_starts, self.context_lens,
            self.block_tables, self.scale, window,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of an attention layer, and how its pages are cut."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


def page_pool(shape: Shape, num_blocks: int) -> Pool:
    """A pool of two layers, full of not-a-numbers; in int8 the scales are such."""
    dtype = str(shape.dtype).removeprefix("torch.")
    pool = Pool(BlockLayout(2, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype), num_blocks)
    pool.data.fill_(255)
    return pool


def fill(pages: Tensor, scales: Tensor | None, table: Tensor, content: Tensor) -> None:
    """Writes content [positions, Hkv, D] to the pages of one request."""
    block_size = pages.shape[1]
    positions = torch.arange(content.shape[0])
    blocks, slots = table[positions // block_size], positions % block_size
    if scales is not None:
        content, scales[blocks, :, slots] = quantize(content)
    pages[blocks, slots] = content.to(pages.dtype)


def paged_case(
    shape: Shape,
    contexts: list[int],
    queries: list[int],
    keys: list[Tensor],
    values: list[Tensor],
    q: list[Tensor],
) -> PagedCase:
    """Lays requests out over shuffled blocks. keys[r] is [context, Hkv, D], q[r] is [queries, Hq, D]."""
    counts = [-(-context // shape.block_size) for context in contexts]
    order = torch.randperm(sum(counts)) + 1
    pool = page_pool(shape, sum(counts) + 1)
    (k_pages, v_pages), (k_scales, v_scales) = pool.layer(1), pool.scales(1)
    tables = torch.full((len(contexts), max(counts) + 3), -1, dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start : start + count].int()
        start += count
        fill(k_pages, k_scales, tables[row].long(), keys[row])
        fill(v_pages, v_scales, tables[row].long(), values[row])
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    flat = torch.cat(q).reshape(int(starts[-1]), -1)
    qkv = torch.cat((flat, torch.randn(flat.shape[0], 2 * shape.num_kv_heads * shape.head_dim)), dim=1)
    view = qkv[:, : flat.shape[1]].view(flat.shape[0], shape.num_heads, shape.head_dim)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    scales = {} if k_scales is None or v_scales is None else {"k_scales": k_scales, "v_scales": v_scales}
    return PagedCase(
        view, k_pages, v_pages, starts, lengths, tables[:, :-1], shape.head_dim**-0.5, scales
    )  # fmt: skip


def random_case(shape: Shape, contexts: list[int], queries: list[int]) -> PagedCase:
    """A batch of random requests."""
    keys = [torch.randn(context, shape.num_kv_heads, shape.head_dim) for context in contexts]
    values = [torch.randn(context, shape.num_kv_heads, shape.head_dim) for context in contexts]
    q = [torch.randn(count, shape.num_heads, shape.head_dim) * 2 for count in queries]
    return paged_case(shape, contexts, queries, keys, values, q)


@contextmanager
def instruction_set(isa: str) -> Iterator[None]:
    """Native kernels use one instruction set inside; an empty name leaves them as they are."""
    if not isa:
        yield
        return
    before = native.isa()
    native.select_isa(isa)
    try:
        yield
    finally:
        native.select_isa(before)


def instruction_sets() -> tuple[str, ...]:
    """All instruction sets that run here."""
    return native.usable_isas() if native.available() else ()
