"""Memory: what scheduler and engine ask of the component that gives sequences their blocks."""

from collections.abc import Iterable
from typing import Protocol

from quire.core.request import Request, Sequence
from quire.core.stats import MemoryStats
from quire.memory.adapter_pages import AdapterPages
from quire.memory.offload_cache import OffloadCache
from quire.memory.paged import HeldBlocks, TableDelta
from quire.memory.swap import PendingTransfers, SwapSpace


class Memory(Protocol):
    """All-or-nothing: a call that cannot be granted changes nothing and says so.

    It is the only writer of a sequence's `block_ids`, `host_block_ids`, `block_hashes` and `num_indexed`.
    """

    stats: MemoryStats
    block_size: int

    @property
    def transfers(self) -> PendingTransfers:
        """Copies between the pool and host memory that the next step carries."""
        ...

    @property
    def swap(self) -> SwapSpace: ...

    @property
    def offload_cache(self) -> OffloadCache | None:
        """Host-memory tier of the prefix cache; None if evicted blocks are lost."""
        ...

    @property
    def adapter_pages(self) -> AdapterPages: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_pinned(self) -> int:
        """Blocks of pinned prefixes, which no request can have."""
        ...

    @property
    def usage(self) -> float: ...

    def blocks_for(self, num_positions: int) -> int: ...

    def blocks_at_most(self, request: Request) -> int:
        """The most blocks that the request can ever hold."""
        ...

    def held_blocks(self, sequences: Iterable[Sequence]) -> HeldBlocks:
        """Blocks of these sequences, and how many of them the prefix cache would keep."""
        ...

    def admit(self, leader: Sequence, num_sequences: int, num_blocks: int, headroom: int) -> bool:
        """Whether the leader's group fits: `num_blocks` for its `num_sequences`, with `headroom` blocks left free."""
        ...

    def pin(self, request: Request) -> int:
        """Pins the full blocks of a prompt that was computed; returns how many."""
        ...

    def match_prefix(self, sequence: Sequence) -> int:
        """Shares cached blocks into an empty table; returns the number of positions that need no prefill."""
        ...

    def is_loading_prefix(self, sequence: Sequence) -> bool:
        """Whether more of the prefix is being read from the disk tier, and worth waiting for."""
        ...

    def fetch_prefix(self, sequence: Sequence) -> int:
        """More such positions, whose blocks the offload cache copies back with the next step."""
        ...

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the next position can be written without an allocation."""
        ...

    def allocate(self, sequence: Sequence, num_positions: int, delta: TableDelta) -> bool:
        """Makes positions num_computed … num_positions writable by this sequence alone."""
        ...

    def cache_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Indexes blocks that became full, `num_computed` positions of known tokens being computed."""
        ...

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """The child begins with its parent's first `num_computed` positions."""
        ...

    def release(self, sequence: Sequence) -> None: ...

    def reset_prefix_index(self) -> None: ...

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recounts everything; raises RuntimeError on the first inconsistency."""
        ...
