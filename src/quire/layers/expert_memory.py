"""Which experts of a layer stay in fast memory, decided by how often tokens go through them."""

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.moe.records import AwayExperts
from quire.layers.streaming import CopyStream, PinnedMemory

DECAY = 0.98  # of a count, per pass: what was used 50 passes ago counts a third
PASSES = 64  # between two looks at what a device counted
MOVES = 4  # experts of a layer that come to a device after such a look, at most: a step waits for them


class ExpertMemory(Protocol):
    """Told of every pass of one layer's experts. chosen [T, k] int32."""

    @property
    def resident(self) -> frozenset[int]:
        """Experts that stay until the next pass."""
        ...

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


class PinnedExperts:
    """Experts of a GPU's layer: some in its memory, the others in pinned host memory, where kernels read them.

    The device counts how often each is chosen. Counts come to the host beside the computation and are looked at PASSES
    passes later, when they have long arrived; then the most used of the others change places with the least used
    resident ones. Copies are queued between passes, so every pass finds all experts.
    """

    def __init__(
        self, stacks: tuple[Tensor, Tensor], away: AwayExperts, copies: CopyStream, memory: PinnedMemory
    ) -> None:
        """stacks: gate_up and down of the resident ones. `away` lies in `memory`, which stays pinned until the end."""
        self._pairs = list(zip(stacks, (away.gate_up, away.down), strict=True))
        self._away = away
        self._places: list[int] = away.places.tolist()
        self._copies = copies
        self._counts = torch.zeros_like(away.places, dtype=torch.int64)
        self._seen = torch.zeros(
            len(self._places), dtype=torch.int64, pin_memory=self._counts.device.type == "cuda"
        )
        self._memory = memory
        self._mark = copies.mark()
        self._num_passes = 0

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(expert for expert, place in enumerate(self._places) if place >= 0)

    def before(self, chosen: Tensor) -> None:
        ids = chosen.flatten().long()
        self._counts.scatter_add_(0, ids, torch.ones_like(ids))

    def after(self, chosen: Tensor) -> None:
        self._num_passes += 1
        if self._num_passes % PASSES:
            return
        self._copies.settle(self._mark)
        self._exchange(self._seen.tolist())
        self._seen.copy_(self._counts, non_blocking=True)
        self._counts //= 4  # what was used long ago fades
        self._mark = self._copies.mark()

    def _exchange(self, counts: list[int]) -> None:
        ranked = sorted(range(len(counts)), key=lambda expert: counts[expert], reverse=True)
        coming = [expert for expert in ranked if self._places[expert] < 0][:MOVES]
        going = [expert for expert in reversed(ranked) if self._places[expert] >= 0]
        moved = False
        for new, old in zip(coming, going, strict=False):
            if counts[new] <= counts[old]:
                break
            here, there = self._places[old], self._places[new]
            for stack, others in self._pairs:
                left = stack[here].clone()
                stack[here].copy_(others[-1 - there], non_blocking=True)
                others[-1 - there].copy_(left, non_blocking=True)
            self._places[old], self._places[new] = there, here
            moved = True
        if moved:
            self._away.places.copy_(torch.tensor(self._places, dtype=torch.int32))


class MappedExperts:
    """Experts in a mapped file. A chosen one is read from the file by the product itself; after each pass, all but the
    most used ones leave the process's memory.

    Nothing is written to them. A file that is cut while it is mapped ends the process (SIGBUS).
    """

    def __init__(self, mapping: mmap.mmap, experts: Sequence[Sequence[Tensor]], num_resident: int) -> None:
        """`experts`: each one's tensors, views of the mapping."""
        base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._mapping = mapping
        self._pages = [[_pages(t.data_ptr() - base, t.nbytes) for t in tensors] for tensors in experts]
        self._num_resident = num_resident
        self._use = ExpertUse(len(experts))
        self._resident: frozenset[int] = frozenset()

    @property
    def resident(self) -> frozenset[int]:
        return self._resident

    def before(self, chosen: Tensor) -> None:
        for expert in set(chosen.unique().tolist()) - self.resident:
            self._advise(expert, mmap.MADV_WILLNEED)

    def after(self, chosen: Tensor) -> None:
        self._use.add(chosen)
        present = self.resident.union(chosen.unique().tolist())
        self._resident = present.intersection(self._use.most_used(self._num_resident))
        for expert in present - self.resident:
            self._advise(expert, mmap.MADV_DONTNEED)

    def _advise(self, expert: int, advice: int) -> None:
        for first, size in self._pages[expert]:
            self._mapping.madvise(advice, first, size)


def _pages(first: int, num_bytes: int) -> tuple[int, int]:
    """(first byte, bytes) of the whole pages that these bytes lie in."""
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    return start, first + num_bytes - start
