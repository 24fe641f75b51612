"""LoRA in layers: the sites of a model, the adapters of a step's rows, and the addition to a layer's result.

Sites are derived from the loaders of a model's weights, so that model files know nothing of adapters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.adapters.sites import Site
from quire.kernels.lora import reference
from quire.kernels.lora.records import MAX_PARTS, LoraSegments, LoraTables
from quire.parallel.cut import Cut, divided
from quire.parallel.group import Group
from quire.weights.cut import TensorCut, tensor_cut

if TYPE_CHECKING:
    from quire.layers.parameters import LayerPart, Loader

SHORT, LONG = 16, 64  # rows of a segment: for decodes, and for many rows per adapter
MANY_FROM = 1024  # rows of a batch from which on long segments are faster


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The adapter of each row of a batch. Layers are called with None where no row has one."""

    tables: LoraTables
    segments: LoraSegments
    kinds: int  # bitmask of the kinds of layers (LoraSite.kind) that some of these adapters add to

    def adds_to(self, group: "LoraGroup | None") -> bool:
        return group is not None and bool(self.kinds >> group.kind & 1)


@dataclass(frozen=True, slots=True)
class LoraSite(Site):
    """A site in a built model."""

    index: int = 0  # its column in the tables
    kind: int = 0  # equal for layers that differ only in their number, and for parts of one fused layer


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """The sites of one layer: the parts of a fused projection, or the only one."""

    kernel: ModuleType
    first_site: int
    bounds: tuple[int, ...]  # part p adds to columns bounds[p] … bounds[p + 1] - 1
    kind: int
    columns: Tensor | None = None  # [outputs] int64, the ones of this rank; None: all

    @property
    def takes_whole_rows(self) -> bool:
        """Whether x has all columns where ranks have some each."""
        return True

    def add(self, x: Tensor, y: Tensor, lora: LoraBatch) -> Tensor:
        """x [T, inputs] is the GEMM's input, y [T, outputs] its result, which is added to in place."""
        whole = y
        if self.columns is not None:  # every rank has the whole adapter
            whole = y.new_zeros(y.shape[0], self.bounds[-1])
            whole[:, self.columns] = y
        self.kernel.add(x, whole, lora.tables, lora.segments, self.first_site, self.bounds)
        return y if self.columns is None else y.copy_(whole[:, self.columns])

    def add_embedded(self, ids: Tensor, y: Tensor, lora: LoraBatch, num_ids: int, first_id: int) -> Tensor:
        """ids [T] are the embedding's input, y [T, width] its rows, which are added to in place."""
        self.kernel.add_embedded(ids, y, lora.tables, lora.segments, self.first_site, num_ids, first_id)
        return y


@dataclass(frozen=True, slots=True)
class ShardedLoraGroup(LoraGroup):
    """Sites of a layer whose adapters are divided among ranks, in plain torch: x A of every row is exchanged.

    Rows have adapters of any ranks, and none is padded. `bounds` are this rank's columns; sites come in pairs.
    """

    ranks: Group = field(default_factory=Group)
    tag: str = ""  # what the bytes are counted as
    # x is some of the columns: partial results of A are summed; otherwise they are gathered.
    joins: bool = False

    @property
    def takes_whole_rows(self) -> bool:
        return False

    def add(self, x: Tensor, y: Tensor, lora: LoraBatch) -> Tensor:
        tables, segments = lora.tables, list(reference.segments_of(lora.segments))
        for part, (first, last) in enumerate(pairwise(self.bounds)):
            site = self.first_site + 2 * part
            lora_ranks = [int(tables.ranks[slot, site + 1]) for slot, _ in segments]
            inner = self._exchanged(x, site, segments, lora_ranks, tables)
            for (slot, rows), values in zip(segments, inner, strict=True):
                b = reference.matrices(tables, slot, site + 1, 0, last - first)[1]
                y[rows, first:last] += float(tables.scales[slot, site + 1]) * (values @ b)
        return y

    def _exchanged(
        self,
        x: Tensor,
        site: int,
        segments: list[tuple[int, Tensor]],
        lora_ranks: list[int],
        tables: LoraTables,
    ) -> list[Tensor]:
        """x A of each segment [rows, rank]."""
        own = [
            x[rows].float() @ reference.matrices(tables, slot, site, x.shape[1], 0)[0].t()
            for slot, rows in segments
        ]
        flat = torch.cat([values.reshape(1, -1) for values in own], dim=1)
        counts = [len(rows) for _, rows in segments]
        if self.joins:
            sizes = [n * r for n, r in zip(counts, lora_ranks, strict=True)]
            pieces = self.ranks.all_reduce(flat, self.tag).split(sizes, dim=1)
            return [piece.view(n, r) for piece, n, r in zip(pieces, counts, lora_ranks, strict=True)]
        widths = self._widths(lora_ranks)
        sizes = [sum(n * w for n, w in zip(counts, row, strict=True)) for row in widths]
        parts = self.ranks.all_gather(flat, tuple(sizes), self.tag).split(sizes, dim=1)
        by_rank = []
        for part, row in zip(parts, widths, strict=True):
            pieces = part.split([n * w for n, w in zip(counts, row, strict=True)], dim=1)
            by_rank.append([piece.view(n, w) for piece, n, w in zip(pieces, counts, row, strict=True)])
        return [torch.cat(pieces, dim=1) for pieces in zip(*by_rank, strict=True)]

    def _widths(self, lora_ranks: list[int]) -> list[list[int]]:
        """Of each process, how many ranks of each adapter it has."""
        spans = [list(divided(r, self.ranks.size)) for r in lora_ranks]
        return [[span[rank][1] - span[rank][0] for span in spans] for rank in range(self.ranks.size)]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows grouped by adapter: the contents of LoraSegments."""

    order: np.ndarray  # [T] int32
    slots: np.ndarray  # [G] int32
    starts: np.ndarray  # [G + 1] int32


def segment_length(num_lines: int, invariant: bool = False) -> int:
    """The segment length for a batch of this many rows; `invariant`: no row may depend on others."""
    return LONG if num_lines >= MANY_FROM and not invariant else SHORT


def max_segments(num_lines: int, num_slots: int, max_lines: int) -> int:
    """The most segments that a batch of this many rows and adapters can have."""
    return min(num_lines, num_slots + num_lines // max_lines)


def group_by_adapter(line_slots: np.ndarray, max_lines: int) -> Grouped:
    """Groups rows by adapter. line_slots [T]: each row's adapter, -1 for none; rows of one adapter keep their order.

    `order` starts with the rows that have an adapter; the rest is not part of any segment.
    """
    order = np.argsort(line_slots, kind="stable")
    order = np.roll(order, -int(np.count_nonzero(line_slots < 0)))
    adapters, counts = np.unique(line_slots[line_slots >= 0], return_counts=True)
    pieces = -(-counts // max_lines)  # segments of each adapter
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    firsts = np.repeat(np.cumsum(counts) - counts, pieces) + within * max_lines
    starts = np.append(firsts, int(counts.sum()))
    return Grouped(
        order.astype(np.int32), np.repeat(adapters, pieces).astype(np.int32), starts.astype(np.int32)
    )


def install_sites(
    loaders: "Mapping[str, Loader]", kernel: ModuleType, cut: Cut | None = None, shards: Group | None = None
) -> tuple[LoraSite, ...]:
    """Enables adapters at every matrix of a model; returns the sites in the order of their indices.

    `kernel`: from `factory.kernel(self.tag)`. Without this call no layer ever looks at adapters. `cut`: of a model that
    several ranks hold; sites are those of the whole. `shards`: the ranks that divide every adapter among them, which
    then has two sites for each of the model's.
    """
    layers: dict[int, list[tuple[str, LayerPart]]] = {}
    for tensor, loader in loaders.items():
        for part in loader.parts:
            name = part.module or tensor.removesuffix(".weight")
            layers.setdefault(id(part.layer), []).append((name, part))
    sites: list[LoraSite] = []
    kinds: dict[tuple[str, ...], int] = {}
    for named in layers.values():
        parts = sorted(named, key=lambda item: item[1].first_row)
        assert len(parts) <= MAX_PARTS, f"{parts[0][0]} is fused with more than {MAX_PARTS - 1} others"
        alike = tuple(re.sub(r"\d+", "#", name) for name, _ in parts)
        kind = kinds.setdefault(alike, len(kinds))
        cuts = [None if cut is None else tensor_cut(cut, f"{name}.weight") for name, _ in parts]
        widths = [
            part.num_outputs if rows is None or rows.dimension else rows.size
            for (_, part), rows in zip(parts, cuts, strict=True)
        ]
        first = parts[0][1].first_row
        bounds = tuple(accumulate((first, *widths)))
        layer = parts[0][1].layer
        if shards is None:
            layer.take_lora(LoraGroup(kernel, len(sites), bounds, kind, _columns(cuts, bounds)))
        elif any(cuts):
            here = tuple(accumulate((first, *(part.num_outputs for _, part in parts))))
            joins = all(rows is not None and rows.dimension == 1 for rows in cuts)
            tag = f"lora {'attention' if '.self_attn.' in parts[0][0] else 'mlp'}"
            group = ShardedLoraGroup(kernel, 2 * len(sites), here, kind, None, shards, tag, joins)
            layer.take_lora(group)
        else:
            layer.take_lora(LoraGroup(kernel, 2 * len(sites), bounds, kind))
        sites += [
            LoraSite(name, part.num_inputs, width, part.is_embedding, len(sites) + i, kind)
            for i, ((name, part), width) in enumerate(zip(parts, widths, strict=True))
        ]
    return tuple(sites)


def _columns(cuts: "list[TensorCut | None]", bounds: tuple[int, ...]) -> Tensor | None:
    """Of a layer whose parts' rows are cut: the rows of the whole that are here."""
    spans = [
        (bound + first, bound + last)
        for rows, bound in zip(cuts, bounds, strict=False)
        if rows is not None and rows.dimension == 0
        for first, last in rows.spans
    ]
    return torch.cat([torch.arange(*span) for span in spans]) if spans else None
