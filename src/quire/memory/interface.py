"""Memory: what the scheduler asks of whoever gives sequences their blocks."""

from collections.abc import Iterable
from typing import Protocol

from quire.core.request import Request, Sequence
from quire.core.stats import MemoryStats
from quire.memory.adapter_pages import AdapterPages
from quire.memory.offload_cache import OffloadCache
from quire.memory.paged import TableDelta
from quire.memory.swap import SwapSpace
from quire.memory.transfers import PendingTransfers


class Memory(Protocol):
    """All-or-nothing: a call that cannot be granted changes nothing and says so."""

    stats: MemoryStats
    moves: PendingTransfers  # that the next step must carry
    swap: SwapSpace
    home: OffloadCache | None  # of what is evicted
    adapter_pages: AdapterPages
    block_size: int

    @property
    def reserves(self) -> bool:
        """Whether all that a request may ever need is taken when it is admitted, so that `grow` never fails."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def usage(self) -> float: ...

    def blocks_for(self, num_positions: int) -> int: ...

    def blocks_at_most(self, request: Request) -> int:
        """The most that the request can ever hold."""
        ...

    def reserve(self, leader: Sequence, num_sequences: int) -> bool:
        """Takes all that so many sequences of the leader's request may need; nothing where memory does not reserve."""
        ...

    @property
    def num_held(self) -> int:
        """Blocks that are held for good."""
        ...

    def hold(self, request: Request) -> int:
        """Holds the full blocks of a prompt that was computed, for good; how many."""
        ...

    def match(self, sequence: Sequence) -> int:
        """Positions at the start of an empty table that need not be computed."""
        ...

    def awaits(self, sequence: Sequence) -> bool:
        """Whether more of its prefix is on its way to host memory, and worth waiting for."""
        ...

    def fetch(self, sequence: Sequence) -> int:
        """More such positions, whose blocks come back from the second home with the next step."""
        ...

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the next position can be written as things are."""
        ...

    def grow(self, sequence: Sequence, num_positions: int, delta: TableDelta) -> bool:
        """Makes positions num_computed … num_positions writable by this sequence alone."""
        ...

    def seal(self, sequence: Sequence, num_computed: int) -> None:
        """So many positions are computed, of tokens that are known."""
        ...

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """The child begins with its parent's first `num_computed` positions."""
        ...

    def release(self, sequence: Sequence) -> None: ...

    def reset_prefix_index(self) -> None: ...

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recounts everything; raises RuntimeError on the first thing that is off."""
        ...
