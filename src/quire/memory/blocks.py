"""BlockPool: reference counts and the free list of block ids. PrefixIndex: full blocks by the hash of their content."""

import hashlib

from quire.core.request import Ints


class BlockPool:
    """Ids 1 … num_blocks. Block 0 is never given out, so it serves as the free list's sentinel.

    The free list is O(1): uncached blocks first, then the least recently used. A freed block keeps its content until
    `take` gives it out again: a prefix hit brings it back with `share`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [0] * (num_blocks + 1)
        self._next: list[int] = [*range(1, num_blocks + 1), 0]  # 0 → 1 → 2 → … → 0
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        # Blocks whose references changed, and whether they were taken for new content; None: not watched.
        self.changed: dict[int, bool] | None = None

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def take(self) -> int:
        """The first free block, now with one reference. The caller checked `num_free`."""
        block = self._next[0]
        if block == 0:
            raise RuntimeError("take from an empty block pool: check num_free first")
        self._unlink(block)
        self.ref_counts[block] = 1
        if self.changed is not None:
            self.changed[block] = True
        return block

    def share(self, block: int) -> None:
        """One more reference; a free block leaves the free list with its content."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
        self.ref_counts[block] += 1
        if self.changed is not None:
            self.changed.setdefault(block, False)

    def release(self, block: int, keep: bool = True) -> None:
        """One reference less; a block without any joins the free list: at its end to `keep` the content, else at its
        front, where the next `take` finds it still warm in the CPU's caches.
        """
        count = self.ref_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self.ref_counts[block] = count
        if self.changed is not None:
            self.changed.setdefault(block, False)
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

    def check_counts(self, counts: list[int], name: str) -> None:
        """Raises RuntimeError for the first `name` whose holders, recounted, are not its references."""
        for block, (expected, count) in enumerate(zip(self.ref_counts, counts, strict=True)):
            if expected != count:
                raise RuntimeError(f"{name} {block} has {expected} references but {count} holders")

    def free_blocks(self) -> list[int]:
        """The free list in order, for checks."""
        blocks, block = [], self._next[0]
        while block:
            blocks.append(block)
            block = self._next[block]
        return blocks


class PrefixIndex:
    """Content hash ↔ block id, one block per content.

    A hash covers the model's fingerprint, a salt, and every token up to the block's end (chained through
    its parent), so equal hashes mean equal K and V, and one salt cannot probe another's blocks.
    """

    def __init__(self, num_blocks: int, fingerprint: str) -> None:
        self._fingerprint = fingerprint.encode()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)

    def root(self, salt: str) -> bytes:
        """The parent of a first block."""
        return hashlib.sha256(self._fingerprint + b"\0" + salt.encode()).digest()

    @staticmethod
    def chain(parent: bytes, token_ids: Ints) -> bytes:
        return hashlib.sha256(parent + token_ids.tobytes()).digest()

    def find(self, content: bytes) -> int | None:
        return self._block_of.get(content)

    def knows(self, block: int) -> bool:
        """Whether the block is indexed."""
        return self._hash_of[block] is not None

    def content_of(self, block: int) -> bytes | None:
        return self._hash_of[block]

    def put(self, content: bytes, block: int) -> None:
        """Indexes the block, unless another block with the same content is."""
        if content not in self._block_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            del self._block_of[content]

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of = [None] * len(self._hash_of)

    def __len__(self) -> int:
        return len(self._block_of)

    def check_integrity(self) -> None:
        for content, block in self._block_of.items():
            if self._hash_of[block] != content:
                raise RuntimeError(f"the prefix index names block {block} for a content it does not hold")
