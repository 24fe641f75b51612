"""LoRA in layers: the sites of a model, the adapters of a step's rows, and the addition to a layer's result.

Sites are derived from the loaders of a model's weights, so that model files know nothing of adapters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.kernels.lora.records import MAX_PARTS, LoraSegments, LoraTables
from quire.parallel.cut import Cut, TensorCut

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
class LoraSite:
    """One matrix that adapters can add to."""

    name: str  # of its module, as in the checkpoint: "model.layers.0.self_attn.q_proj"
    index: int  # its column in the tables
    kind: int  # equal for layers that differ only in their number, and for parts of one fused layer
    num_inputs: int  # of an embedding: its ids
    num_outputs: int
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """The sites of one layer: the parts of a fused projection, or the only one."""

    kernel: ModuleType
    first_site: int
    bounds: tuple[int, ...]  # part p adds to columns bounds[p] … bounds[p + 1] - 1
    kind: int
    columns: Tensor | None = None  # [outputs] int64, the ones of this rank; None: all

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
    loaders: "Mapping[str, Loader]", kernel: ModuleType, cut: Cut | None = None
) -> tuple[LoraSite, ...]:
    """Enables adapters at every matrix of a model; returns the sites in the order of their indices.

    `kernel`: from `factory.kernel("lora")`. Without this call no layer ever looks at adapters. `cut`: of a model that
    several ranks hold; sites are those of the whole.
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
        cuts = [None if cut is None else cut.tensor(f"{name}.weight") for name, _ in parts]
        widths = [
            part.num_outputs if rows is None or rows.dimension else rows.size
            for (_, part), rows in zip(parts, cuts, strict=True)
        ]
        first = parts[0][1].first_row
        bounds = tuple(accumulate((first, *widths)))
        parts[0][1].layer.take_lora(LoraGroup(kernel, len(sites), bounds, kind, _columns(cuts, bounds)))
        sites += [
            LoraSite(name, len(sites) + i, kind, part.num_inputs, width, part.is_embedding)
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
