"""Preemption: whether a group that must leave the pool is swapped out or computed again, by what each would cost."""

from collections.abc import Sequence as Listed

from quire.core.request import Sequence
from quire.memory.interface import Memory
from quire.memory.paged import PagedMemory

FORGETTING = 0.98  # per step: how much of what was measured before still counts
NEWEST = 0.25  # how much the newest return tells of how many blocks the prefix index keeps
FIRST_KEPT = 0.5


class PromptSpeed:
    """Seconds per token that is computed beside others: the slope of a line through the last steps.

    Nothing is timed at start for it: who is preempted has computed a prompt here before.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        keep = FORGETTING
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + num_tokens * num_tokens
        self._products = keep * self._products + num_tokens * seconds

    @property
    def token_seconds(self) -> float:
        """0 until a step was seen."""
        if not self._tokens:
            return 0.0
        mean = self._seconds / self._tokens
        spread = self._weight * self._squares - self._tokens**2
        if spread <= 0.01 * self._tokens**2:
            return mean  # steps of one size only: no line can be drawn
        slope = (self._weight * self._products - self._tokens * self._seconds) / spread
        return min(mean, slope) if slope > 0.0 else mean


class Preemption:
    """`recompute`: blocks are given up. `swap`: they go to host memory while it lasts. `auto`: the cheaper one."""

    def __init__(self, mode: str, block_seconds: float = 0.0) -> None:
        """`block_seconds`: what moving one block over the link takes, one way."""
        self._mode = mode
        self._block_seconds = block_seconds
        self._kept = FIRST_KEPT  # of indexed blocks that nobody else holds, how many outlast a preemption
        self.speed = PromptSpeed()

    def swaps(self, sequences: Listed[Sequence], memory: PagedMemory) -> bool:
        """Whether to swap these, one group's, out. They may still find no room there."""
        if self._mode == "recompute" or not memory.swap.hosts.num_free:
            return False
        if self._mode == "swap":
            return True
        held: dict[int, int] = {}
        for block in (block for s in sequences for block in s.block_ids):
            held[block] = held.get(block, 0) + 1
        found = 0.0  # blocks that the prefix index will give back for nothing
        for block, count in held.items():
            if memory.index.knows(block):
                found += 1.0 if memory.pool.ref_counts[block] > count else self._kept
        missing = len(held) - found
        moving = (len(held) + missing) * self._block_seconds
        token_seconds = self.speed.token_seconds
        return not token_seconds or moving < missing * memory.block_size * token_seconds

    def fetching_pays(self, memory: Memory) -> bool:
        """Whether a block from the second home comes sooner than its tokens are computed."""
        token_seconds = self.speed.token_seconds
        return not token_seconds or self._block_seconds < memory.block_size * token_seconds

    def waits_for_shelf(self, sequence: Sequence, memory: Memory) -> bool:
        """Whether the sequence should be admitted later: more of its prefix is being read, and that is quicker."""
        if memory.home is None or memory.home.shelf is None:
            return False
        token_seconds = self.speed.token_seconds
        dear = self._block_seconds + memory.home.shelf.block_seconds()
        return (not token_seconds or dear < memory.block_size * token_seconds) and memory.awaits(sequence)

    def returned(self, num_found: int, num_blocks: int) -> None:
        """A preempted group is back, and found so many of its full blocks in the prefix index."""
        if num_blocks:
            self._kept += NEWEST * (num_found / num_blocks - self._kept)
