"""Which experts of a layer stay in fast memory, decided by how often tokens go through them."""

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

DECAY = 0.98  # of a count, per pass: what was used 50 passes ago counts a third


class ExpertMemory(Protocol):
    """Told of every pass of one layer's experts. chosen [T, k] int32."""

    def before(self, chosen: Tensor) -> None: ...
    def after(self, chosen: Tensor) -> None: ...


class ExpertUse:
    """How often each expert of a layer was chosen, recent passes first."""

    def __init__(self, num_experts: int) -> None:
        self._counts = torch.zeros(num_experts)

    def add(self, chosen: Tensor) -> None:
        counts = torch.bincount(chosen.flatten(), minlength=len(self._counts))
        self._counts.mul_(DECAY).add_(counts)

    def most_used(self, count: int) -> list[int]:
        """At most `count` experts that were ever chosen, ties to the lowest id."""
        ranked = self._counts.sort(descending=True, stable=True)
        return ranked.indices[:count][ranked.values[:count] > 0].tolist()


class MappedExperts:
    """Experts in a mapped file. A chosen one is read from the file by the product itself; after each pass, all but the
    most used ones leave the process's memory.

    Nothing is written to them. A file that is cut while it is mapped ends the process (SIGBUS).
    """

    def __init__(
        self, mapping: mmap.mmap, experts: Sequence[Sequence[Tensor]], num_resident: int
    ) -> None:
        """`experts`: each one's tensors, views of the mapping."""
        base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._mapping = mapping
        self._pages = [[_pages(t.data_ptr() - base, t.nbytes) for t in tensors] for tensors in experts]
        self._num_resident = num_resident
        self._use = ExpertUse(len(experts))
        self.resident: frozenset[int] = frozenset()

    def before(self, chosen: Tensor) -> None:
        for expert in set(chosen.unique().tolist()) - self.resident:
            self._advise(expert, mmap.MADV_WILLNEED)

    def after(self, chosen: Tensor) -> None:
        self._use.add(chosen)
        present = self.resident.union(chosen.unique().tolist())
        self.resident = present.intersection(self._use.most_used(self._num_resident))
        for expert in present - self.resident:
            self._advise(expert, mmap.MADV_DONTNEED)

    def _advise(self, expert: int, advice: int) -> None:
        for first, size in self._pages[expert]:
            self._mapping.madvise(advice, first, size)


def _pages(first: int, num_bytes: int) -> tuple[int, int]:
    """(first byte, bytes) of the whole pages that these bytes lie in."""
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    return start, first + num_bytes - start
