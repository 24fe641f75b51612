"""PagedMemory: block tables. Sharing, copy-on-write and prefix hits happen here."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.core.layout import LayerGroups
from quire.core.request import Request, Sequence, ints
from quire.core.stats import MemoryStats
from quire.core.step import HostTransfers
from quire.memory.adapter_pages import AdapterPages
from quire.memory.blocks import BlockCounts, BlockPool, PrefixIndex
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

    A table has `num_groups` blocks for the same positions, one after another. Of groups whose layers have a sliding
    window, blocks that no later query sees are freed and become block 0 in the table.

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
        groups: LayerGroups | None = None,
        max_step_tokens: int = 0,
    ) -> None:
        """`offload_cache` is built over the same `transfers`. Without `share` a fork copies its blocks at once, the
        baseline of sharing. `adapter_pages` replaces pages in this pool, for the baseline of unified paging. `groups`:
        None if all layers share a block; with `max_step_tokens` they give the most blocks of a sequence.
        """
        groups = groups or LayerGroups.together(1)
        self.block_size = block_size
        self.num_groups, self.num_full = groups.num_groups, groups.num_full
        self._num_window = groups.num_window
        self._counts = BlockCounts(groups, block_size, max_step_tokens)
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks, fingerprint, self.num_groups)
        own = weakref.proxy(self)  # a cycle would keep a closed engine's memory until garbage is collected
        self.adapter_pages = adapter_pages or AdapterPages(self.pool, lambda: own._take())
        self.stats = MemoryStats()
        self.transfers = transfers if transfers is not None else PendingTransfers()
        self.swap = SwapSpace(
            num_swap_blocks, block_size, self.pool, self.index, self.transfers, lambda: own._take()
        )
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

    def blocks_for(self, num_positions: int, num_held: int = 0) -> int:
        """The most blocks that a sequence whose table has `num_held` still needs at once."""
        return self._counts.needed(num_positions, num_held)

    def blocks_shared(self, request: Request) -> int:
        """Full blocks of the prompt, which its sequences share; those of a window may be freed before a fork."""
        return request.num_prompt_tokens // self.block_size * self.num_full if self._share else 0

    def blocks_at_most(self, request: Request) -> int:
        """The most blocks that the request can ever hold: full prompt blocks are shared, others are per sequence."""
        # where a window was freed, a sequence may have to compute its prompt on its own
        shared = 0 if self._num_window else self.blocks_shared(request)
        own = self.blocks_for(request.max_len - 1) - shared
        return shared + own * request.sampling.num_sequences

    def positions_in(self, num_blocks: int, request: Request) -> int:
        """How long each of the request's sequences may become in `num_blocks`: the inverse of `blocks_at_most`."""
        shared = 0 if self._num_window else self.blocks_shared(request)
        own = max(0, num_blocks - shared) // request.sampling.num_sequences
        return self._counts.positions_in(shared + own)

    def held_blocks(self, sequences: Iterable[Sequence]) -> HeldBlocks:
        counts: dict[int, int] = {}
        for block in (block for s in sequences for block in s.block_ids if block):
            counts[block] = counts.get(block, 0) + 1
        indexed = {block: count for block, count in counts.items() if self.index.knows(block)}
        num_shared = sum(self.pool.ref_counts[block] > count for block, count in indexed.items())
        return HeldBlocks(len(counts), num_shared, len(indexed) - num_shared)

    def admit(self, leader: Sequence, num_sequences: int, num_blocks: int, headroom: int) -> bool:
        """Whether the leader's group fits: `num_blocks` more for its `num_sequences`, with `headroom` blocks left free.

        Takes nothing: blocks are allocated when they are needed.
        """
        return num_blocks + headroom <= self.pool.num_free

    # ------------------------------------------------------------------ the prefix cache

    def match_prefix(self, sequence: Sequence) -> int:
        """Shares the longest cached prefix into an empty table; returns the number of positions it covers.

        The last known token is always computed: its logits are needed. Of a group with a window only the last blocks
        are needed.
        """
        hashes = self._prefix_hashes(sequence)
        sequence.num_indexed = self._num_hit(sequence, hashes, 0, self.index.find)
        sequence.block_ids = self._blocks_by(self.index.find, hashes, 0, sequence.num_indexed)
        for block in sequence.block_ids:
            self.pool.share(block)
        return sequence.num_indexed * self.block_size

    def _num_hit(
        self, sequence: Sequence, hashes: list[bytes], num_held: int, find: Callable[[bytes], object]
    ) -> int:
        """Blocks of the longest prefix that goes on from `num_held`, by what `find` knows of each content."""
        num_found = num_hit = num_held  # blocks of all groups in a row
        for i, content in enumerate(hashes[num_held:], num_held + 1):
            there = [find(each) for each in self.index.contents(content)]
            if not all(there[: self.num_full]):
                break
            num_found = num_found + 1 if all(there) else 0
            if num_found >= i - self._counts.first_seen(i * self.block_size):
                num_hit = i
        return num_hit

    def _blocks_by(
        self, get: Callable[[bytes], int | None], hashes: list[bytes], first: int, last: int
    ) -> list[int]:
        """A table from `first` to `last`: 0 for what `get` has not, and for what no later position sees."""
        seen, table = self._counts.first_seen(last * self.block_size), list[int]()
        for i in range(first, last):
            contents = self.index.contents(hashes[i])[: self.num_full if i < seen else None]
            table += [get(each) or 0 for each in contents] + [0] * (self.num_groups - len(contents))
        return table

    def is_loading_prefix(self, sequence: Sequence) -> bool:
        """Whether more of the prefix is being read from the disk tier, and worth waiting for."""
        if self.offload_cache is None:
            return False
        contents = (c for content in self._prefix_hashes(sequence) for c in self.index.contents(content))
        missing = (c for c in contents if self.index.find(c) is None)
        return self.offload_cache.is_loading(sequence.request.request_id, missing)

    def fetch_prefix(self, sequence: Sequence) -> int:
        """Continues where `match_prefix` ended with blocks of the offload cache; returns the positions covered.

        The copies are among the next step's transfers, and the blocks are indexed when that step is committed. The
        caller has checked that there is room.
        """
        if self.offload_cache is None:
            return 0
        cache, hashes = self.offload_cache, self._prefix_hashes(sequence)
        before = len(sequence.block_ids) // self.num_groups
        after = self._num_hit(sequence, hashes, before, lambda c: self.index.find(c) or cache.has(c))
        table = self._blocks_by(self._fetch, hashes, before, after)
        num_unseen = max(0, self._counts.first_seen(after * self.block_size) - before) * self._num_window
        if table.count(0) > num_unseen:  # one was evicted by those before it: nothing is fetched
            for block in filter(None, table):
                self.pool.release(block, keep=self.index.knows(block))
            return 0
        for _ in range(num_unseen):
            self.pool.share(0)
        sequence.block_ids += table
        return (after - before) * self.block_size

    def cache_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Indexes blocks that became full: tokens known to the host, K and V computed up to `num_computed`."""
        if not self._enable_prefix_caching:
            return
        full = min(num_computed, len(sequence.token_ids)) // self.block_size
        full = min(full, len(sequence.block_ids) // self.num_groups)
        if full <= sequence.num_indexed:
            return
        self._extend_hashes(sequence, full)
        self._put(sequence, sequence.num_indexed, full)
        sequence.num_indexed = full

    def pin(self, request: Request) -> int:
        """Pins the full blocks of a prompt that was just computed; returns how many."""
        token_ids = ints(request.prompt_token_ids)
        token_ids.append(0)  # `match_prefix` leaves out the last token
        pinned = Sequence(request, 0, token_ids)
        self.match_prefix(pinned)
        self._pinned.append(pinned)
        self.num_pinned = len(self.pinned_blocks())
        return len(pinned.block_ids) - pinned.block_ids.count(0)

    def pinned_blocks(self) -> set[int]:
        return {
            block for prefix in self._pinned for block in prefix.block_ids if block
        }  # they may share some

    def reset_prefix_index(self) -> None:
        """Empties the cache but for pinned prefixes; blocks in use stay with their sequences."""
        self.index.clear()
        if self.offload_cache is not None:
            self.offload_cache.clear()
        for pinned in self._pinned:
            self._put(pinned, 0, pinned.num_indexed)

    def _put(self, sequence: Sequence, first: int, last: int) -> None:
        """Indexes the blocks of every group."""
        groups = self.num_groups
        for i in range(first, last):
            blocks = sequence.block_ids[i * groups : (i + 1) * groups]
            for content, block in zip(self.index.contents(sequence.block_hashes[i]), blocks, strict=True):
                if block:
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
        index = sequence.num_computed // self.block_size * self.num_groups
        block_ids = sequence.block_ids
        return self._share and index < len(block_ids) and self.pool.ref_counts[block_ids[index]] == 1

    def allocate(self, sequence: Sequence, num_positions: int, delta: TableDelta) -> bool:
        """Makes positions num_computed … num_positions writable by this sequence alone, or changes nothing but that
        blocks behind its window are freed.
        """
        if self._num_window:
            self._free_behind(sequence, delta)
        block_ids = sequence.block_ids
        ref_counts = self.pool.ref_counts
        first = sequence.num_computed // self.block_size * self.num_groups if self._share else 0
        shared = [i for i in range(first, len(block_ids)) if ref_counts[block_ids[i]] > 1]
        num_new = self._counts.whole(num_positions) * self.num_groups - len(block_ids)
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

    def _free_behind(self, sequence: Sequence, delta: TableDelta) -> None:
        """Frees blocks behind the window. Those to be indexed when their step is committed are freed after that."""
        first = self._counts.first_seen(sequence.num_computed)
        if self._enable_prefix_caching:
            first = min(first, sequence.num_indexed)
        for i in range(first - 1, -1, -1):
            blocks = sequence.block_ids[self._counts.windows_of(i)]
            if not all(blocks):
                break  # and so are all before
            sequence.block_ids[self._counts.windows_of(i)] = [0] * self._num_window
            for index, block in enumerate(blocks, i * self.num_groups + self.num_full):
                self.pool.share(0)
                self.pool.release(block, keep=self.index.knows(block))
                delta.add(sequence.row, index, 0)

    def _copy_on_write(self, sequence: Sequence, index: int, delta: TableDelta) -> None:
        """Gives the sequence its own copy of a shared block."""
        source, target = sequence.block_ids[index], self._take()
        delta.copy_sources.append(source)
        delta.copy_targets.append(target)
        self.pool.release(source)  # other sequences still hold it
        sequence.block_ids[index] = target
        delta.add(sequence.row, index, target)
        sequence.num_indexed = min(sequence.num_indexed, index // self.num_groups)
        self.stats.copies += 1

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> int:
        """The child shares every block that holds one of its parent's first `num_computed` positions.

        Returns the positions that the child has: where the parent has freed what a window would see, the ones that the
        prefix index finds.
        """
        first = self._counts.first_seen(num_computed) * self.num_groups
        if self._num_window and 0 in parent.block_ids[first : first + self.num_groups]:
            return self.match_prefix(child)
        child.block_ids = parent.block_ids[: self._counts.whole(num_computed) * self.num_groups]
        for block in child.block_ids:
            self.pool.share(block)
        # Past the shared prefix the tokens diverge, so do the block hashes.
        shared = num_computed // self.block_size
        child.num_indexed = min(parent.num_indexed, shared)
        child.block_hashes = parent.block_hashes[:shared]
        return num_computed

    def release(self, sequence: Sequence) -> None:
        """Frees all blocks, the last first, so that a prefix is reused after its end: it serves more requests."""
        for block in reversed(sequence.block_ids):
            self.pool.release(block, keep=self.index.knows(block))
        if sequence.host_block_ids:
            self.swap.release(sequence)
        sequence.block_ids = []
        sequence.num_indexed = 0

    def take_transfers(self) -> HostTransfers | None:
        """Copies to and from host memory that the next step carries, once; None if there are none."""
        pending = self.transfers
        return pending.take() if pending.out_blocks or pending.in_blocks else None

    def _take(self) -> int:
        """A free block. Its previous content is evicted: from the index to the offload cache, or an idle adapter."""
        block = self.pool.take()
        if self.offload_cache is not None and (content := self.index.content_of(block)) is not None:
            self.offload_cache.save(content, block)
        self.index.forget(block)
        if block in self.adapter_pages.owner:
            self.adapter_pages.evict_owner(block)
        return block

    def _fetch(self, content: bytes) -> int | None:
        """A reference to the block with this content, from the pool or the offload cache."""
        block = self.index.find(content)
        if block is None:
            return self._take_for(content)
        self.pool.share(block)
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
        if counts[0] and not self._num_window:
            raise RuntimeError("block 0 was given out")
        self.pool.check_counts(counts, "block")
        free = self.pool.free_blocks()
        if len(free) != self.num_free or sorted(free) != [b for b in range(1, len(counts)) if counts[b] == 0]:
            raise RuntimeError("the free list disagrees with the reference counts")
        self.index.check_integrity()
