"""Preemption: whether a preempted group is swapped out or recomputed, by what each would cost."""

from collections.abc import Sequence as Listed

from quire.core.request import Sequence
from quire.memory.paged import PagedMemory
from quire.scheduler.pacing import PromptSpeed

NEWEST = 0.25  # weight of the newest return in the estimate of blocks that the prefix cache keeps
FIRST_KEPT = 0.5


class Preemption:
    """`recompute`: blocks are freed. `swap`: they go to host memory while it lasts. `auto`: the cheaper one."""

    def __init__(self, mode: str, block_seconds: float = 0.0) -> None:
        """`block_seconds`: time of copying one block over the link, one way."""
        self._mode = mode
        self._block_seconds = block_seconds
        # share of indexed, unshared blocks that are still cached when their group returns
        self._kept = FIRST_KEPT
        self.speed = PromptSpeed()

    def swaps(self, sequences: Listed[Sequence], memory: PagedMemory) -> bool:
        """Whether to swap out these sequences of one group. Host memory may still lack room for them."""
        if self._mode == "recompute" or not memory.swap.hosts.num_free:
            return False
        if self._mode == "swap":
            return True
        held = memory.held_blocks(sequences)
        missing = held.total - held.indexed_shared - self._kept * held.indexed  # blocks to recompute
        copying = (held.total + missing) * self._block_seconds
        return self._is_quicker(copying, missing * memory.block_size)

    def fetching_pays(self, memory: PagedMemory) -> bool:
        """Whether copying a block from the offload cache is quicker than computing its tokens."""
        return self._is_quicker(self._block_seconds, memory.block_size)

    def waits_for_disk(self, sequence: Sequence, memory: PagedMemory) -> bool:
        """Whether to admit the sequence later: more of its prefix is being read from disk, and that is quicker."""
        cache = memory.offload_cache
        if cache is None or cache.disk_tier is None:
            return False
        seconds = self._block_seconds + cache.disk_tier.block_seconds()
        return self._is_quicker(seconds, memory.block_size) and memory.is_loading_prefix(sequence)

    def _is_quicker(self, seconds: float, num_tokens: float) -> bool:
        """Whether `seconds` are less than computing `num_tokens` takes, or that is not known yet."""
        token_seconds = self.speed.token_seconds
        return not token_seconds or seconds < num_tokens * token_seconds

    def returned(self, num_cached: int, num_blocks: int) -> None:
        """A preempted group is back: `num_cached` of its `num_blocks` full blocks were still in the prefix cache."""
        if num_blocks:
            self._kept += NEWEST * (num_cached / num_blocks - self._kept)
