"""LoRA in layers: the sites of a model, the adapters of a step's rows, and the addition to a layer's result.

Sites are derived from the loaders of a model's weights, so that model files know nothing of adapters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.kernels.lora.records import MAX_PARTS, LoraSegments, LoraTables

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

    def add(self, x: Tensor, y: Tensor, lora: LoraBatch) -> Tensor:
        """x [T, inputs] is the GEMM's input, y [T, outputs] its result, which is added to in place."""
        self.kernel.add(x, y, lora.tables, lora.segments, self.first_site, self.bounds)
        return y

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


def install_sites(loaders: "Mapping[str, Loader]", kernel: ModuleType) -> tuple[LoraSite, ...]:
    """Enables adapters at every matrix of a model; returns the sites in the order of their indices.

    `kernel`: from `factory.kernel("lora")`. Without this call no layer ever looks at adapters.
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
        bounds = (*(part.first_row for _, part in parts), parts[-1][1].first_row + parts[-1][1].num_outputs)
        parts[0][1].layer.take_lora(LoraGroup(kernel, len(sites), bounds, kind))
        sites += [
            LoraSite(name, len(sites) + i, kind, part.num_inputs, part.num_outputs, part.is_embedding)
            for i, (name, part) in enumerate(parts)
        ]
    return tuple(sites)
