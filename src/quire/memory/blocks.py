"""BlockPool: reference-counted block ids with an O(1) free list, uncached blocks first, then least recently used."""


class BlockPool:
    """Ids 1 … num_blocks. Block 0 is never given out, so it serves as the free list's sentinel.

    A freed block keeps its content until `take` gives it out again: a prefix hit brings it back with `share`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [0] * (num_blocks + 1)
        self._next: list[int] = [*range(1, num_blocks + 1), 0]  # 0 → 1 → 2 → … → 0
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def take(self) -> int:
        """The first free block, now with one reference. The caller checked `num_free`."""
        block = self._next[0]
        if block == 0:
            raise RuntimeError("take from an empty block pool: check num_free first")
        self._unlink(block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; a free block leaves the free list with its content."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
        self.ref_counts[block] += 1

    def release(self, block: int, keep: bool = True) -> None:
        """One reference less; a block without any joins the free list: at its end to `keep` the content, else at its
        front, where the next `take` finds it still warm in the CPU's caches.
        """
        count = self.ref_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self.ref_counts[block] = count
        if count == 0:
            before, after = (self._previous[0], 0) if keep else (0, self._next[0])
            self._next[before] = block
            self._previous[block] = before
            self._next[block] = after
            self._previous[after] = block
            self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def free_blocks(self) -> list[int]:
        """The free list in order, for checks."""
        blocks, block = [], self._next[0]
        while block:
            blocks.append(block)
            block = self._next[block]
        return blocks
