"""PagedMemory: block tables. Sharing, copy-on-write and prefix hits happen here."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.request import Request, Sequence, ints
from quire.core.stats import MemoryStats
from quire.memory.adapter_pages import AdapterPages
from quire.memory.blocks import BlockPool, PrefixIndex
from quire.memory.offload_cache import OffloadCache
from quire.memory.swap import PendingTransfers, SwapSpace


@dataclass(slots=True)
class TableDelta:
    """Changes of block tables that a step carries to the runner: new entries, and block copies before the pass."""

    rows: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    copy_sources: list[int] = field(default_factory=list)
    copy_targets: list[int] = field(default_factory=list)

    def add(self, row: int, index: int, block: int) -> None:
        self.rows.append(row)
        self.indices.append(index)
        self.blocks.append(block)

    def take_back(self, sequences: Iterable[Sequence]) -> dict[int, int]:
        """Drops the changes of preempted sequences. Returns the dropped copies: target block → source block."""
        sequences = list(sequences)
        rows = {s.row for s in sequences}
        if not rows.isdisjoint(self.rows):
            kept = [
                entry
                for entry in zip(self.rows, self.indices, self.blocks, strict=True)
                if entry[0] not in rows
            ]
            self.rows, self.indices, self.blocks = ([entry[i] for entry in kept] for i in range(3))
        held = {block for s in sequences for block in s.block_ids}
        copies = list(zip(self.copy_sources, self.copy_targets, strict=True))
        self.copy_sources = [source for source, target in copies if target not in held]
        self.copy_targets = [target for _, target in copies if target not in held]
        return {target: source for source, target in copies if target in held}


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of some sequences, each counted once. Indexed blocks stay in the prefix cache until they are reused."""

    total: int
    indexed_shared: int  # held by other sequences as well
    indexed: int  # the other indexed ones


class PagedMemory:
    """All-or-nothing: a call that cannot be granted changes nothing and says so.

    It is the only writer of a sequence's `block_ids`, `host_block_ids`, `block_hashes` and `num_indexed`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fingerprint: str = "",
        enable_prefix_caching: bool = True,
        share: bool = True,
        num_swap_blocks: int = 0,
        transfers: PendingTransfers | None = None,
        offload_cache: OffloadCache | None = None,
        adapter_pages: AdapterPages | None = None,
    ) -> None:
        """`offload_cache` is built over the same `transfers`. Without `share` a fork copies its blocks at once, the
        baseline of sharing. `adapter_pages` replaces pages in this pool, for the baseline of unified paging.
        """
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks, fingerprint)
        self.adapter_pages = adapter_pages or AdapterPages(self.pool, self._take)
        self.stats = MemoryStats()
        self.transfers = transfers if transfers is not None else PendingTransfers()
        self.swap = SwapSpace(num_swap_blocks, block_size, self.pool, self.index, self.transfers, self._take)
        self.offload_cache = offload_cache
        self.num_pinned = 0  # blocks of pinned prefixes, which no request can have
        self._pinned: list[Sequence] = []
        self._enable_prefix_caching = enable_prefix_caching and share
        self._share = share

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def blocks_at_most(self, request: Request) -> int:
        """The most blocks that the request can ever hold: full prompt blocks are shared, others are per sequence."""
        shared = request.num_prompt_tokens // self.block_size if self._share else 0
        own = self.blocks_for(request.max_len - 1) - shared
        return shared + own * request.sampling.num_sequences

    def held_blocks(self, sequences: Iterable[Sequence]) -> HeldBlocks:
        counts: dict[int, int] = {}
        for block in (block for s in sequences for block in s.block_ids):
            counts[block] = counts.get(block, 0) + 1
        indexed = {block: count for block, count in counts.items() if self.index.knows(block)}
        num_shared = sum(self.pool.ref_counts[block] > count for block, count in indexed.items())
        return HeldBlocks(len(counts), num_shared, len(indexed) - num_shared)

    def admit(self, leader: Sequence, num_sequences: int, num_blocks: int, headroom: int) -> bool:
        """Whether the leader's group fits: `num_blocks` for its `num_sequences`, with `headroom` blocks left free.

        Takes nothing: blocks are allocated when they are needed.
        """
        return num_blocks - len(leader.block_ids) + headroom <= self.pool.num_free

    # ------------------------------------------------------------------ the prefix cache

    def match_prefix(self, sequence: Sequence) -> int:
        """Shares the longest cached prefix into an empty table; returns the number of positions it covers.

        The last known token is always computed: its logits are needed.
        """
        for content in self._prefix_hashes(sequence):
            block = self.index.find(content)
            if block is None:
                break
            self.pool.share(block)
            sequence.block_ids.append(block)
        sequence.num_indexed = len(sequence.block_ids)
        return len(sequence.block_ids) * self.block_size

    def is_loading_prefix(self, sequence: Sequence) -> bool:
        """Whether more of the prefix is being read from the disk tier, and worth waiting for."""
        if self.offload_cache is None:
            return False
        missing = (c for c in self._prefix_hashes(sequence) if self.index.find(c) is None)
        return self.offload_cache.is_loading(sequence.request.request_id, missing)

    def fetch_prefix(self, sequence: Sequence) -> int:
        """Continues where `match_prefix` ended with blocks of the offload cache; returns the positions covered.

        The copies are among the next step's transfers, and the blocks are indexed when that step is committed. The
        caller has checked that there is room.
        """
        if self.offload_cache is None:
            return 0
        num_before = len(sequence.block_ids)
        for content in self._prefix_hashes(sequence)[num_before:]:
            block = self.index.find(content)
            if block is not None:
                self.pool.share(block)
            elif self.offload_cache.has(content):
                block = self._take_for(content)
            if block is None:
                break
            sequence.block_ids.append(block)
        return (len(sequence.block_ids) - num_before) * self.block_size

    def cache_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Indexes blocks that became full: tokens known to the host, K and V computed up to `num_computed`."""
        if not self._enable_prefix_caching:
            return
        full = min(num_computed, len(sequence.token_ids)) // self.block_size
        full = min(full, len(sequence.block_ids))
        if full <= sequence.num_indexed:
            return
        self._extend_hashes(sequence, full)
        for i in range(sequence.num_indexed, full):
            self.index.put(sequence.block_hashes[i], sequence.block_ids[i])
        sequence.num_indexed = full

    def pin(self, request: Request) -> int:
        """Pins the full blocks of a prompt that was just computed; returns how many."""
        token_ids = ints(request.prompt_token_ids)
        token_ids.append(0)  # `match_prefix` leaves out the last token
        pinned = Sequence(request, 0, token_ids)
        self.match_prefix(pinned)
        self._pinned.append(pinned)
        self.num_pinned = len(self.pinned_blocks())
        return len(pinned.block_ids)

    def pinned_blocks(self) -> set[int]:
        return {block for prefix in self._pinned for block in prefix.block_ids}  # they may share some

    def reset_prefix_index(self) -> None:
        """Empties the cache but for pinned prefixes; blocks in use stay with their sequences."""
        self.index.clear()
        if self.offload_cache is not None:
            self.offload_cache.clear()
        for pinned in self._pinned:
            for content, block in zip(pinned.block_hashes, pinned.block_ids, strict=False):
                self.index.put(content, block)

    def _prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks before the last known token; none if the sequence must compute its whole prompt."""
        if not self._enable_prefix_caching or sequence.request.sampling.prompt_logprobs is not None:
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_hashes(sequence, num_blocks)
        return sequence.block_hashes[:num_blocks]

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes, size = sequence.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else self.index.root(self._salt(sequence.request))
        for i in range(len(hashes), num_blocks):
            parent = self.index.chain(parent, sequence.token_ids[i * size : (i + 1) * size])
            hashes.append(parent)

    def _salt(self, request: Request) -> str:
        """Separates requests whose tokens give different K and V, or that must not share a cache."""
        adapter = "" if request.adapter is None else self.adapter_pages.salt(request.adapter)
        return f"{adapter}\0{request.cache_salt}"

    # ------------------------------------------------------------------ block tables

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the next position can be written without an allocation: the common case of a decode, kept cheap."""
        index = sequence.num_computed // self.block_size
        block_ids = sequence.block_ids
        return self._share and index < len(block_ids) and self.pool.ref_counts[block_ids[index]] == 1

    def allocate(self, sequence: Sequence, num_positions: int, delta: TableDelta) -> bool:
        """Makes positions num_computed … num_positions writable by this sequence alone, or changes nothing."""
        block_ids = sequence.block_ids
        ref_counts = self.pool.ref_counts
        first = sequence.num_computed // self.block_size if self._share else 0
        shared = [i for i in range(first, len(block_ids)) if ref_counts[block_ids[i]] > 1]
        num_new = self.blocks_for(num_positions) - len(block_ids)
        if num_new <= 0 and not shared:
            return True
        if len(shared) + max(num_new, 0) > self.pool.num_free:
            return False
        for index in shared:
            self._copy_on_write(sequence, index, delta)
        for _ in range(num_new):
            block = self._take()
            delta.add(sequence.row, len(block_ids), block)
            block_ids.append(block)
        return True

    def _copy_on_write(self, sequence: Sequence, index: int, delta: TableDelta) -> None:
        """Gives the sequence its own copy of a shared block."""
        source, target = sequence.block_ids[index], self._take()
        delta.copy_sources.append(source)
        delta.copy_targets.append(target)
        self.pool.release(source)  # other sequences still hold it
        sequence.block_ids[index] = target
        delta.add(sequence.row, index, target)
        sequence.num_indexed = min(sequence.num_indexed, index)
        self.stats.copies += 1

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """The child shares every block that holds one of its parent's first `num_computed` positions."""
        child.block_ids = parent.block_ids[: self.blocks_for(num_computed)]
        for block in child.block_ids:
            self.pool.share(block)
        # Past the shared prefix the tokens diverge, so do the block hashes.
        shared = num_computed // self.block_size
        child.num_indexed = min(parent.num_indexed, shared)
        child.block_hashes = parent.block_hashes[:shared]

    def release(self, sequence: Sequence) -> None:
        """Frees all blocks, the last first, so that a prefix is reused after its end: it serves more requests."""
        for block in reversed(sequence.block_ids):
            self.pool.release(block, keep=self.index.knows(block))
        if sequence.host_block_ids:
            self.swap.release(sequence)
        sequence.block_ids = []
        sequence.num_indexed = 0

    def _take(self) -> int:
        """A free block. Its previous content is evicted: from the index to the offload cache, or an idle adapter."""
        block = self.pool.take()
        if self.offload_cache is not None and (content := self.index.content_of(block)) is not None:
            self.offload_cache.save(content, block)
        self.index.forget(block)
        if block in self.adapter_pages.owner:
            self.adapter_pages.evict_owner(block)
        return block

    def _take_for(self, content: bytes) -> int | None:
        """A block that gets `content` from the offload cache; None if taking a block has just evicted it there."""
        block = self._take()
        if self.offload_cache is not None and self.offload_cache.claim(content, block):
            return block
        self.pool.release(block, keep=False)
        return None

    # ------------------------------------------------------------------ checks

    def recount(self, sequences: Iterable[Sequence]) -> list[int]:
        """Each block's references, counted from the tables."""
        counts = [0] * (self.num_blocks + 1)
        for sequence in (*sequences, *self._pinned):
            for block in sequence.block_ids:
                counts[block] += 1
        self.adapter_pages.count_references(counts)
        return counts

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recounts everything from the tables; raises RuntimeError on the first inconsistency."""
        sequences = list(sequences)
        self.swap.check_integrity(sequences)
        if self.offload_cache is not None:
            self.offload_cache.check_integrity()
        counts = self.recount(sequences)
        if counts[0]:
            raise RuntimeError("block 0 was given out")
        self.pool.check_counts(counts, "block")
        free = self.pool.free_blocks()
        if len(free) != self.num_free or sorted(free) != [b for b in range(1, len(counts)) if counts[b] == 0]:
            raise RuntimeError("the free list disagrees with the reference counts")
        self.index.check_integrity()
