"""Adapters as layers see them: which sites a layer has, and what a step's lines add to its product."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
from torch import Tensor

from quire.kernels.lora.records import LoraSegments, LoraTables

FEW_LINES, MANY_LINES = 16, 64  # of a segment: for decodes, and where adapters have long runs of lines each
MANY_FROM = 1024  # lines of a batch from which on long segments pay


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which line of a batch uses which adapter. Layers are called with None where no line uses any."""

    tables: LoraTables
    segments: LoraSegments
    kinds: int  # a bit for each kind of layer (LoraSite.kind) that some of these adapters add to

    def adds_to(self, group: "LoraGroup | None") -> bool:
        return group is not None and bool(self.kinds >> group.kind & 1)


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One matrix that adapters can add to."""

    name: str  # of its module, as in the checkpoint: "model.layers.0.self_attn.q_proj"
    index: int  # its column in the tables
    kind: int  # layers that differ in their number only are of one kind, and so are parts of one fused layer
    num_inputs: int  # of an embedding: its ids
    num_outputs: int
    is_embedding: bool


class LoraGroup:
    """The sites of one layer: the parts of a fused projection, or the only one."""

    def __init__(self, kernel: ModuleType, first_site: int, bounds: tuple[int, ...], kind: int) -> None:
        self._kernel = kernel
        self._first_site = first_site
        self._bounds = bounds  # part p adds to columns bounds[p] … bounds[p + 1] - 1
        self.kind = kind

    def add(self, x: Tensor, y: Tensor, lora: LoraBatch) -> Tensor:
        """x [T, inputs] is what the layer multiplied, y [T, outputs] the product, which is added to in place."""
        self._kernel.add(x, y, lora.tables, lora.segments, self._first_site, self._bounds)
        return y

    def add_embedded(self, ids: Tensor, y: Tensor, lora: LoraBatch, num_ids: int, first_id: int) -> Tensor:
        """ids [T] are what the layer looked up, y [T, width] their rows, which are added to in place."""
        self._kernel.add_embedded(ids, y, lora.tables, lora.segments, self._first_site, num_ids, first_id)
        return y


@dataclass(frozen=True, slots=True)
class Grouped:
    """Lines by adapter, as the segments of a LoraBatch want them."""

    order: np.ndarray  # [T] int32
    slots: np.ndarray  # [G] int32
    starts: np.ndarray  # [G + 1] int32


def segment_lines(num_lines: int, invariant: bool = False) -> int:
    """How long the segments of a batch of so many lines may be; `invariant`: no line may depend on others."""
    return MANY_LINES if num_lines >= MANY_FROM and not invariant else FEW_LINES


def max_segments(num_lines: int, num_slots: int, max_lines: int) -> int:
    """No batch of so many lines with so many adapters has more segments."""
    return min(num_lines, num_slots + num_lines // max_lines)


def group_lines(line_slots: np.ndarray, max_lines: int) -> Grouped:
    """line_slots [T]: each line's adapter, -1 for none. Lines of one adapter keep their order; the others are left out.

    `order` starts with the lines that have an adapter; what follows them is not part of any segment.
    """
    order = np.argsort(line_slots, kind="stable")
    order = np.roll(order, -int(np.count_nonzero(line_slots < 0)))
    found, counts = np.unique(line_slots[line_slots >= 0], return_counts=True)
    pieces = -(-counts // max_lines)  # segments of each adapter
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    firsts = np.repeat(np.cumsum(counts) - counts, pieces) + within * max_lines
    starts = np.append(firsts, int(counts.sum()))
    return Grouped(order.astype(np.int32), np.repeat(found, pieces).astype(np.int32), starts.astype(np.int32))
