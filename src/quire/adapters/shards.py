"""Shards of an adapter (S-LoRA's tensor parallelism): each rank holds a part of every matrix, and no part is padded.

Where ranks divide a layer's outputs, A is divided by its rank dimension and B by outputs; where they divide its inputs,
A is divided by inputs and every rank has B. A and B of one rank then differ in their rank dimension, so each has a
site of its own: 2s and 2s + 1 for site s of the model.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from quire.adapters.adapter_file import TensorEntry
from quire.adapters.packing import Matrices
from quire.parallel.cut import Cut, divided
from quire.weights.cut import TensorCut, tensor_cut

Shape = tuple[int, int, int, int]  # site, rank, inputs, outputs


@dataclass(frozen=True, slots=True)
class Shards:
    """How sites are divided among the ranks."""

    cut: Cut

    def tensors(self, m: Matrices, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's A [r, inputs] and B [outputs, r]."""
        rows = self.site(m.name)
        if rows is None:
            return a, b
        if rows.dimension == 1:
            ((first, last),) = rows.spans
            return a[:, first:last], b
        first, last = rank_span(a.shape[0], self.cut.rank, self.cut.size)
        kept = [index for span in rows.spans for index in range(*span)]
        return a[first:last], b[kept]

    def site(self, name: str) -> TensorCut | None:
        """None: every rank has all of it, such as an embedding."""
        return tensor_cut(self.cut, f"{name}.weight")

    def matrices(self, m: Matrices, a: TensorEntry, b: TensorEntry) -> tuple[Matrices, ...]:
        """A part of the adapter as its two sites, or as one where the model's site is whole."""
        if self.site(m.name) is None:
            return (replace(m, site=2 * m.site, a=a, b=b),)
        no_b, no_a = replace(b, shape=(0, a.shape[0])), replace(a, shape=(b.shape[1], 0))
        return replace(m, site=2 * m.site, a=a, b=no_b), replace(m, site=2 * m.site + 1, a=no_a, b=b)

    def shapes(self, whole: tuple[Matrices, ...], rank: int) -> tuple[Shape, ...]:
        """What any rank has of an adapter."""
        there, shapes = Shards(replace(self.cut, rank=rank)), list[Shape]()
        for m in whole:
            rows, r = there.site(m.name), m.a.shape[0]
            if rows is None:
                shapes.append((2 * m.site, r, m.a.shape[1], m.b.shape[0]))
                continue
            by_inputs = rows.dimension == 1
            first, last = (0, r) if by_inputs else rank_span(r, rank, self.cut.size)
            shapes.append((2 * m.site, last - first, rows.kept if by_inputs else m.a.shape[1], 0))
            shapes.append((2 * m.site + 1, r, 0, m.b.shape[0] if by_inputs else rows.kept))
        return tuple(shapes)


def rank_span(lora_rank: int, rank: int, size: int) -> tuple[int, int]:
    """Which of an adapter's ranks a process has: fewer than there are processes may leave some without."""
    return list(divided(lora_rank, size))[rank]
