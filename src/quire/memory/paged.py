"""PagedMemory: gives sequences their blocks. Sharing, copy-on-write and prefix hits happen here."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.ints import ints
from quire.core.request import Request, Sequence
from quire.core.stats import MemoryStats
from quire.memory.adapter_pages import AdapterPages
from quire.memory.blocks import BlockPool
from quire.memory.offload_cache import OffloadCache
from quire.memory.prefix import PrefixIndex
from quire.memory.swap import SwapSpace
from quire.memory.transfers import PendingTransfers


@dataclass(slots=True)
class TableDelta:
    """What a step must tell the runner about block tables: new entries, and page copies before the pass."""

    rows: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    copy_sources: list[int] = field(default_factory=list)
    copy_targets: list[int] = field(default_factory=list)

    def take_back(self, sequences: Iterable[Sequence]) -> dict[int, int]:
        """Forgets what was noted for sequences that leave. Returns, by the target of each copy that is not made now,
        the block whose content it would have got.
        """
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


class PagedMemory:
    """All-or-nothing: a call that cannot be granted changes nothing and says so."""

    reserves = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fingerprint: str = "",
        enable_prefix_caching: bool = True,
        share: bool = True,
        num_swap_blocks: int = 0,
    ) -> None:
        """Without `share` a fork's blocks are its own before it computes anything: what sharing is measured against."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks, fingerprint)
        self.adapter_pages = AdapterPages(self.pool, self._take)
        self.stats = MemoryStats()
        self.moves = PendingTransfers()  # that the next step must carry
        self.swap = SwapSpace(num_swap_blocks, block_size, self.pool, self.index, self.moves, self._take)
        self.home: OffloadCache | None = None  # None: what is evicted is gone
        self._held: list[Sequence] = []  # prefixes that are never given up
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
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def blocks_at_most(self, request: Request) -> int:
        """The most that the request can ever hold: full prompt blocks are shared, the rest is each sequence's."""
        shared = request.num_prompt_tokens // self.block_size if self._share else 0
        own = self.blocks_for(request.max_len - 1) - shared
        return shared + own * request.sampling.num_sequences

    def reserve(self, leader: Sequence, num_sequences: int) -> bool:
        """Blocks are taken when they are needed: `grow` says whether there are any."""
        return True

    def match(self, sequence: Sequence) -> int:
        """Shares the longest indexed prefix into an empty table and returns how many positions that gives.

        The last known token is never taken from the index: its logits are wanted.
        """
        request = sequence.request
        if not self._enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return 0
        num_candidates = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_hashes(sequence, num_candidates)
        for content in sequence.block_hashes[:num_candidates]:
            block = self.index.find(content)
            if block is None:
                break
            self.pool.share(block)
            sequence.block_ids.append(block)
        sequence.num_indexed = len(sequence.block_ids)
        return len(sequence.block_ids) * self.block_size

    def awaits(self, sequence: Sequence) -> bool:
        """Whether more of the sequence's prefix is on its way to host memory, and worth waiting for."""
        if self.home is None or sequence.request.sampling.prompt_logprobs is not None:
            return False
        num_candidates = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_hashes(sequence, num_candidates)
        missing = (c for c in sequence.block_hashes[:num_candidates] if self.index.find(c) is None)
        return self.home.awaits(sequence.request.request_id, missing)

    def fetch(self, sequence: Sequence) -> int:
        """Goes on where `match` ended, with blocks that the second home has; returns how many positions that gives.

        They are in the next step's moves, and in the index once that step is committed. The caller knows that there
        is room.
        """
        if self.home is None or sequence.request.sampling.prompt_logprobs is not None:
            return 0
        num_before = len(sequence.block_ids)
        num_candidates = (len(sequence.token_ids) - 1) // self.block_size
        for content in sequence.block_hashes[num_before:num_candidates]:
            block = self.index.find(content)
            if block is not None:
                self.pool.share(block)
            elif self.home.has(content):
                block = self._take_for(content)
            if block is None:
                break
            sequence.block_ids.append(block)
        return (len(sequence.block_ids) - num_before) * self.block_size

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the next position can be written as things are: the common case of a decode, kept cheap."""
        index = sequence.num_computed // self.block_size
        block_ids = sequence.block_ids
        return self._share and index < len(block_ids) and self.pool.ref_counts[block_ids[index]] == 1

    def grow(self, sequence: Sequence, num_positions: int, delta: TableDelta) -> bool:
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
            source, target = block_ids[index], self._take()
            delta.copy_sources.append(source)
            delta.copy_targets.append(target)
            self.pool.release(source)  # others hold it still
            block_ids[index] = target
            self._note(delta, sequence.row, index, target)
            sequence.num_indexed = min(sequence.num_indexed, index)
            self.stats.copies += 1
        for _ in range(num_new):
            block = self._take()
            self._note(delta, sequence.row, len(block_ids), block)
            block_ids.append(block)
        return True

    def seal(self, sequence: Sequence, num_computed: int) -> None:
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

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        """The child shares every block that holds one of its parent's first `num_computed` positions."""
        child.block_ids = parent.block_ids[: self.blocks_for(num_computed)]
        for block in child.block_ids:
            self.pool.share(block)
        child.num_computed = num_computed
        # Beyond what they share their tokens differ, and with them what the blocks are called.
        shared = num_computed // self.block_size
        child.num_indexed = min(parent.num_indexed, shared)
        child.block_hashes = parent.block_hashes[:shared]

    def release(self, sequence: Sequence) -> None:
        """Gives everything back. Later blocks go first: a prefix is worth more than its end."""
        for block in reversed(sequence.block_ids):
            self.pool.release(block, keep=self.index.knows(block))
        if sequence.host_block_ids:
            self.swap.release(sequence)
        sequence.block_ids = []
        sequence.num_indexed = 0
        sequence.num_computed = 0

    def hold(self, request: Request) -> int:
        """Keeps the full blocks of a prompt that was just computed, for good; how many there are."""
        token_ids = ints(request.prompt_token_ids)
        token_ids.append(0)  # `match` leaves out the last token
        held = Sequence(request, 0, token_ids)
        self.match(held)
        self._held.append(held)
        return len(held.block_ids)

    @property
    def num_held(self) -> int:
        """Blocks that are held; prefixes may share some."""
        return len({block for held in self._held for block in held.block_ids})

    def reset_prefix_index(self) -> None:
        """Forgets all content but what is held; blocks in use stay with their sequences."""
        self.index.clear()
        if self.home is not None:
            self.home.clear()
        for held in self._held:
            for content, block in zip(held.block_hashes, held.block_ids, strict=False):
                self.index.put(content, block)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recounts everything from the tables; raises RuntimeError on the first thing that is off."""
        counts = [0] * (self.num_blocks + 1)
        sequences = list(sequences)
        self.swap.check_integrity(sequences)
        if self.home is not None:
            self.home.check_integrity()
        for sequence in (*sequences, *self._held):
            for block in sequence.block_ids:
                counts[block] += 1
        self.adapter_pages.count_references(counts)
        if counts[0]:
            raise RuntimeError("block 0 was given out")
        if counts != self.pool.ref_counts:
            wrong = next(b for b, n in enumerate(counts) if n != self.pool.ref_counts[b])
            raise RuntimeError(
                f"block {wrong} has {self.pool.ref_counts[wrong]} references but {counts[wrong]} holders"
            )
        free = self.pool.free_blocks()
        if len(free) != self.num_free or sorted(free) != [b for b in range(1, len(counts)) if counts[b] == 0]:
            raise RuntimeError("the free list disagrees with the reference counts")
        for content, block in self.index.entries():
            if self.index._hash_of[block] != content:
                raise RuntimeError(f"the prefix index names block {block} for a content it does not hold")

    def _take(self) -> int:
        block = self.pool.take()
        if self.home is not None and (content := self.index.content_of(block)) is not None:
            self.home.save(content, block)
        self.index.forget(block)
        self.adapter_pages.taken(block)
        return block

    def _take_for(self, content: bytes) -> int | None:
        """A block that gets what the second home has under this hash; None if taking it cost just that."""
        block = self._take()
        if self.home is not None and self.home.claim(content, block):
            return block
        self.pool.release(block, keep=False)
        return None

    @staticmethod
    def _note(delta: TableDelta, row: int, index: int, block: int) -> None:
        delta.rows.append(row)
        delta.indices.append(index)
        delta.blocks.append(block)

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes, size = sequence.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else self.index.root(self._salt(sequence.request))
        for i in range(len(hashes), num_blocks):
            parent = self.index.chain(parent, sequence.token_ids[i * size : (i + 1) * size])
            hashes.append(parent)

    def _salt(self, request: Request) -> str:
        """Keeps requests apart whose tokens mean different K and V, or who must not see each other's."""
        adapter = "" if request.adapter is None else self.adapter_pages.salt(request.adapter)
        return f"{adapter}\0{request.cache_salt}"
