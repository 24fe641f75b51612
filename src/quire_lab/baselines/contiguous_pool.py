"""ContiguousPool: contiguous runs of block ids, first fit: the allocator of memory that is reserved up front."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    first: int  # block id
    length: int

    @property
    def end(self) -> int:
        return self.first + self.length

    def ids(self) -> list[int]:
        return list(range(self.first, self.end))


class ContiguousPool:
    """Ids 1 … num_blocks; block 0 is never given out. Free neighbours are joined, so gaps are as large as can be.

    Gaps between runs in use may be too small while their sum is not: external fragmentation.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._gaps: list[BlockRun] = [BlockRun(1, num_blocks)]  # free, by first id, none next to another

    def take(self, length: int) -> BlockRun | None:
        """The first `length` ids of the first gap that has them; None if no gap has."""
        for position, gap in enumerate(self._gaps):
            if gap.length >= length:
                rest = BlockRun(gap.first + length, gap.length - length)
                self._gaps[position : position + 1] = [rest] if rest.length else []
                self.num_free -= length
                return BlockRun(gap.first, length)
        return None

    def release(self, run: BlockRun) -> None:
        position = bisect_left(self._gaps, run.first, key=lambda gap: gap.first)
        before = self._gaps[position - 1] if position else None
        after = self._gaps[position] if position < len(self._gaps) else None
        if (before is not None and before.end > run.first) or (after is not None and after.first < run.end):
            raise RuntimeError(f"blocks {run.first} to {run.end - 1} were released more often than taken")
        first, end, repositiond = run.first, run.end, [position, position]
        if before is not None and before.end == run.first:
            first, repositiond[0] = before.first, position - 1
        if after is not None and after.first == run.end:
            end, repositiond[1] = after.end, position + 1
        self._gaps[repositiond[0] : repositiond[1]] = [BlockRun(first, end - first)]
        self.num_free += run.length

    def gaps(self) -> list[BlockRun]:
        """Free runs, in order."""
        return list(self._gaps)
