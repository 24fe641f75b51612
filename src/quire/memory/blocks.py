"""BlockPool: reference counts and the free list of block ids. PrefixIndex: full blocks by the hash of their content."""

import hashlib
import sys

from quire.core.layout import LayerGroups
from quire.core.request import Ints

TAKEN = 1  # for new content
REUSED = 2  # with its content, after it was free


class BlockPool:
    """Ids 1 … num_blocks. Block 0 is never given out, so it serves as the free list's sentinel, and a table may hold
    and share it in place of a block that is not needed any more.

    The free list is O(1): uncached blocks first, then the least recently used. A freed block keeps its content until
    `take` gives it out again: a prefix hit brings it back with `share`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [1] + [0] * num_blocks  # that of block 0 never ends
        self._next: list[int] = [*range(1, num_blocks + 1), 0]  # 0 → 1 → 2 → … → 0
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        # Blocks whose references changed, with TAKEN and REUSED as flags; None: not watched.
        self.changed: dict[int, int] | None = None

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
            self.changed[block] = self.changed.get(block, 0) | TAKEN
        return block

    def share(self, block: int) -> None:
        """One more reference; a free block leaves the free list with its content."""
        is_free = self.ref_counts[block] == 0
        if is_free:
            self._unlink(block)
        self.ref_counts[block] += 1
        if self.changed is not None:
            self.changed[block] = self.changed.get(block, 0) | REUSED * is_free

    def release(self, block: int, keep: bool = True) -> None:
        """One reference less; a block without any joins the free list: at its end to `keep` the content, else at its
        front, where the next `take` finds it still warm in the CPU's caches.
        """
        count = self.ref_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self.ref_counts[block] = count
        if self.changed is not None:
            self.changed.setdefault(block, 0)
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
            count += block == 0
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

    def __init__(self, num_blocks: int, fingerprint: str, num_groups: int = 1) -> None:
        self.num_groups = num_groups  # blocks with the same tokens, each with other layers
        self._fingerprint = fingerprint.encode()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)

    def root(self, salt: str) -> bytes:
        """The parent of a first block."""
        return hashlib.sha256(self._fingerprint + b"\0" + salt.encode()).digest()

    @staticmethod
    def chain(parent: bytes, token_ids: Ints) -> bytes:
        return hashlib.sha256(parent + token_ids.tobytes()).digest()

    def contents(self, content: bytes) -> list[bytes]:
        """What the block of each group is found by."""
        return [content, *(bytes((content[0] ^ i,)) + content[1:] for i in range(1, self.num_groups))]

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


class BlockCounts:
    """Blocks that sequences need, and which of a window are still seen."""

    def __init__(self, groups: LayerGroups, block_size: int, max_step_tokens: int = 0) -> None:
        self._num_groups, self._num_full = groups.num_groups, groups.num_full
        self._num_window, self._window = groups.num_window, groups.window
        self._block_size = block_size
        # of one window: a step's new positions, and those of the step before, which are not indexed yet
        self._most_kept = self.whole(groups.window + 2 * max_step_tokens) + 2

    def whole(self, num_positions: int) -> int:
        """Blocks of one group."""
        return -(-num_positions // self._block_size)

    def needed(self, num_positions: int, num_held: int) -> int:
        """The most blocks that a sequence whose table has `num_held` still needs at once."""
        new = self.whole(num_positions) - num_held // self._num_groups
        return new * self._num_full + min(new, self._most_kept) * self._num_window

    def positions_in(self, num_blocks: int) -> int:
        """How long one sequence may become in `num_blocks`: the inverse of `needed`."""
        if num_blocks <= self._most_kept * self._num_groups or not self._num_window:
            return num_blocks // self._num_groups * self._block_size
        if not self._num_full:
            return sys.maxsize
        return (num_blocks - self._most_kept * self._num_window) // self._num_full * self._block_size

    def first_seen(self, num_computed: int) -> int:
        """The first block of a window that the last computed position sees; later ones see no more."""
        return max(0, num_computed - self._window) // self._block_size

    def windows_of(self, index: int) -> slice:
        """Where a table has the blocks of groups with a window."""
        return slice(index * self._num_groups + self._num_full, (index + 1) * self._num_groups)
