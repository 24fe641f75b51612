"""SwapSpace: host blocks of preempted sequences. PendingTransfers: copies to and from host memory. Ids only."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

from quire.core.request import Sequence, ints
from quire.core.stats import SwapStats
from quire.core.step import HostTransfers
from quire.memory.blocks import BlockPool, PrefixIndex


@dataclass(slots=True)
class PendingTransfers:
    """Collected while a step is planned, and kept until a step carries them: content must not be lost.

    Blocks are copied out before the step writes anything, so they may be reused by the same step.
    """

    out_blocks: list[int] = field(default_factory=list)
    out_hosts: list[int] = field(default_factory=list)
    in_hosts: list[int] = field(default_factory=list)
    in_blocks: list[int] = field(default_factory=list)
    ticket: int = 1  # of these transfers: counts how often a step carried some

    def out(self, block: int, host: int) -> None:
        self.out_blocks.append(block)
        self.out_hosts.append(host)

    def back(self, host: int, block: int) -> None:
        self.in_hosts.append(host)
        self.in_blocks.append(block)

    def take(self) -> HostTransfers | None:
        """The transfers that the next step carries, once; None if there are none."""
        if not self.out_blocks and not self.in_blocks:
            return None
        taken = HostTransfers(
            ints(self.out_blocks), ints(self.out_hosts), ints(self.in_hosts), ints(self.in_blocks)
        )
        self.ticket += 1
        self.out_blocks, self.out_hosts, self.in_hosts, self.in_blocks = [], [], [], []
        return taken


class SwapSpace:
    """Whole requests are swapped out and in, all or nothing. A block that several sequences share is copied once, and
    shared again when it is back.
    """

    def __init__(
        self,
        num_host_blocks: int,
        block_size: int,
        pool: BlockPool,
        index: PrefixIndex,
        transfers: PendingTransfers,
        take: Callable[[], int] | None = None,
    ) -> None:
        """`take` gives a free block of the pool, its previous content evicted."""
        self.hosts = BlockPool(num_host_blocks)
        self.stats = SwapStats()
        self._block_size = block_size
        self._pool = pool
        self._index = index
        self._transfers = transfers
        self._take = take or pool.take

    def out(self, sequences: Listed[Sequence], origins: Mapping[int, int]) -> bool:
        """Copies what the sequences have computed to host memory and frees their blocks, or changes nothing.

        `origins`: target block → source block, of copies that the step being planned would have made.
        """
        held = {block for s in sequences for block in self._computed(s) if block}
        if len(held) > self.hosts.num_free or not held:
            return False
        # Blocks swapped in by this step are not readable yet, and their host copies are still in use.
        if self._transfers.in_blocks:
            return False
        host_of = {0: 0}
        for sequence in sequences:
            for block in self._computed(sequence):
                host = host_of.get(block)
                if host is None:
                    host = host_of[block] = self.hosts.take()
                    self._transfers.out(origins.get(block, block), host)
                else:
                    self.hosts.share(host)
                sequence.host_block_ids.append(host)
        for sequence in sequences:
            for block in reversed(sequence.block_ids):
                self._pool.release(block, keep=self._index.knows(block))
            sequence.block_ids = []
            sequence.num_indexed = 0
        self.stats.blocks_out += len(held)
        return True

    def back(self, sequences: Listed[Sequence]) -> int:
        """Gives every sequence its blocks again; the caller has checked that there is room. Returns how many blocks
        the prefix index still had, which need no copy.
        """
        block_of = {0: 0}
        num_cached = 0
        for sequence in sequences:
            full = sequence.num_computed // self._block_size * self._index.num_groups
            for position, host in enumerate(sequence.host_block_ids):
                block = block_of.get(host)
                if block is not None:
                    self._pool.share(block)
                else:
                    block = self._find(sequence, position) if position < full else None
                    if block is not None:
                        self._pool.share(block)
                        num_cached += 1
                    else:
                        block = self._take()
                        self._transfers.back(host, block)
                        self.stats.blocks_in += 1
                    block_of[host] = block
                sequence.block_ids.append(block)
            self.release(sequence)
        self.stats.blocks_found += num_cached
        return num_cached

    def release(self, sequence: Sequence) -> None:
        """Frees the sequence's host blocks. Transfers run in order, so steps read them before they are reused."""
        for host in sequence.host_block_ids:
            self.hosts.release(host, keep=False)
        sequence.host_block_ids = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recounts the holders of host blocks; raises RuntimeError on the first inconsistency."""
        counts = [0] * (self.hosts.num_blocks + 1)
        for sequence in sequences:
            if sequence.host_block_ids and sequence.block_ids:
                raise RuntimeError(
                    f"request {sequence.request.request_id} holds blocks here and in host memory"
                )
            for host in sequence.host_block_ids:
                counts[host] += 1
        self.hosts.check_counts(counts, "host block")

    def _computed(self, sequence: Sequence) -> list[int]:
        """The blocks that hold computed positions: those allocated beyond them are empty."""
        return sequence.block_ids[: -(-sequence.num_computed // self._block_size) * self._index.num_groups]

    def _find(self, sequence: Sequence, position: int) -> int | None:
        hashes = sequence.block_hashes
        index, group = divmod(position, self._index.num_groups)
        return self._index.find(self._index.contents(hashes[index])[group]) if index < len(hashes) else None
