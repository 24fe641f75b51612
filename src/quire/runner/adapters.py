"""AdapterSlots: adapters in blocks of the pool as kernels find them, and which token of a batch runs with which."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.adapters.packing import MAX_TILES
from quire.adapters.peft import PackedAdapter, describe_packed
from quire.core.request import Ints
from quire.core.step import AdapterLoad, Step
from quire.kernels import registry
from quire.kernels.lora.records import SOURCES, LoraSegments, LoraTables
from quire.kernels.lora_pack.pieces import COLUMNS, PLACE
from quire.kernels.sm_share import side_stream
from quire.layers.attention import Pool
from quire.layers.linear import HEAD
from quire.layers.lora import LoraBatch, LoraSite, group_by_adapter, max_segments, segment_length
from quire.runner.staging import PIECES, Staging

HostCopyOf = Callable[[str], PackedAdapter | None]
STAGING_BYTES = 256 << 20  # on the host, and as many on the device
PIECE_BYTES = STAGING_BYTES // PIECES  # the most that is copied at once


def device_bytes(max_rows: int, num_sites: int) -> int:
    """GPU memory of AdapterSlots beside the pool."""
    return STAGING_BYTES + max_rows * num_sites * (2 * MAX_TILES * 8 + 3 * 4)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A load and its host copy."""

    load: AdapterLoad
    packed: PackedAdapter


@dataclass(slots=True)
class _Resident:
    """An adapter in blocks of the pool: its row of the tables, written when a slot takes it."""

    sites: np.ndarray  # [S]
    tile_a: np.ndarray  # [S, tiles] int64
    tile_b: np.ndarray  # [S, tiles] int64
    ranks: np.ndarray  # [S] int32
    tile_ranks: np.ndarray  # [S] int32
    scales: np.ndarray  # [S] float32
    kinds: int
    copied: torch.cuda.Event | None  # of a copy that the main stream has not waited for yet


class SegmentBuffer:
    """Segments in persistent memory, so that a recorded pass finds them where they were."""

    def __init__(
        self, max_tokens: int, max_slots: int, device: torch.device, invariant: bool = False
    ) -> None:
        self._max_slots = max_slots
        self._invariant = invariant
        self._device = device
        self._filled: tuple[bytes, int] | None = None  # what was written last
        most = max_segments(max_tokens, max_slots, segment_length(1))
        self._order = torch.zeros(max_tokens, dtype=torch.int32)
        self._slots = torch.full((most,), -1, dtype=torch.int32)
        self._starts = torch.zeros(most + 1, dtype=torch.int32)
        if device.type == "cuda":
            self._order, self._slots, self._starts = (
                t.to(device) for t in (self._order, self._slots, self._starts)
            )

    def fill(self, token_slots: np.ndarray, num_tokens: int | None = None) -> LoraSegments:
        """token_slots [T]: slots, -1 for none. As many segments as a batch of `num_tokens` (T or more) may have."""
        size = len(token_slots) if num_tokens is None else num_tokens
        content = token_slots.tobytes(), size
        if content == self._filled:  # decodes: the same rows as in the step before
            return self.view(size)
        self._filled = None  # until all of it is there
        longest = segment_length(size, self._invariant)
        grouped = group_by_adapter(token_slots, longest)
        count = max_segments(size, self._max_slots, longest)
        num_segments = len(grouped.slots)
        packed = np.full(len(token_slots) + 2 * count + 1, -1, np.int32)
        packed[: len(token_slots)] = grouped.order
        packed[len(token_slots) : len(token_slots) + num_segments] = grouped.slots
        starts = packed[len(token_slots) + count :]
        starts[: num_segments + 1] = grouped.starts
        starts[num_segments + 1 :] = grouped.starts[-1]
        sent = torch.from_numpy(packed)
        if self._device.type == "cuda":
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        self._order[: len(token_slots)].copy_(sent[: len(token_slots)])
        self._slots[:count].copy_(sent[len(token_slots) : len(token_slots) + count])
        self._starts[: count + 1].copy_(sent[len(token_slots) + count :])
        self._filled = content
        return self.view(size)

    def view(self, num_tokens: int) -> LoraSegments:
        """What `fill` writes for `num_tokens`; for a pass that is recorded."""
        longest = segment_length(num_tokens, self._invariant)
        count = max_segments(num_tokens, self._max_slots, longest)
        return LoraSegments(self._order[:num_tokens], self._slots[:count], self._starts[: count + 1], longest)


class AdapterSlots:
    """One slot for each adapter that some row runs with; there are as many as rows, so one is always free.

    A step whose `apply` ran out of memory may be applied again.
    """

    def __init__(
        self,
        sites: tuple[LoraSite, ...],
        pool: Pool,
        dtype: torch.dtype,
        max_rows: int,
        max_tokens: int,
        host_copy: HostCopyOf,
        kinds: int = 0,
        recordable: bool = False,
        invariant: bool = False,
        side: torch.cuda.Stream | None = None,
        origin: Callable[[str], tuple[str, str]] | None = None,
    ) -> None:
        """`side`: the stream that loads are copied on; None: one of its own, on a CPU none. `origin`: the name and
        folder from which other ranks read their part; None: they get the copy of this one.
        """
        self.origin = origin
        self._pool = pool
        self._device = device = pool.data.device
        self._host_copy = host_copy
        self._site_kinds = np.array([site.kind for site in sites], np.int64)
        self._head_kinds = sum(1 << site.kind for site in sites if site.name == HEAD)
        self._block_elements = pool.layout.block_bytes // dtype.itemsize
        shape = (max_rows, len(sites))
        self.tables = LoraTables(
            weights=pool.elements(dtype),
            tile_a=torch.zeros(*shape, MAX_TILES, dtype=torch.int64, device=device),
            tile_b=torch.zeros(*shape, MAX_TILES, dtype=torch.int64, device=device),
            ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            tile_ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            scales=torch.zeros(shape, dtype=torch.float32, device=device),
        )
        self._resident: dict[str, _Resident] = {}
        self._slot_of: dict[str, int] = {}
        self._key_of: list[str | None] = [None] * max_rows
        self._last_used = np.zeros(max_rows, np.int64)  # of each slot, in row starts
        self._num_starts = 0
        self._rows_in = np.zeros(max_rows, np.int64)  # rows that use each slot
        self._unwritten: set[int] = set()  # slots whose adapter is not in the tables yet
        self.row_slots = np.full(max_rows, -1, np.int32)
        # bits of the layers that any adapter so far adds to: what a recorded pass must call
        self.kinds = kinds
        self.recordable = recordable  # the kernel is a native operation, or one that a graph can hold
        self._invariant = invariant  # a token's bits must not depend on its neighbours
        self._tokens = SegmentBuffer(max_tokens, max_rows, device, invariant)
        self._wanted = SegmentBuffer(max_tokens + max_rows, max_rows, device, invariant)
        if side is None and device.type == "cuda":
            side = side_stream(device)
        self._side = side
        # A load must fit its largest block; several should not wait for each other.
        size = max(STAGING_BYTES, pool.layout.block_bytes)
        self._staging = Staging(size, pin=True, device=device) if device.type == "cuda" else None
        self._pretends = False
        if self._staging is not None and recordable:
            self._compile_place()

    # ------------------------------------------------------------------ what a step changes

    def packed_loads(self, step: Step) -> list[tuple[Any, bytes]]:
        """The step's loads for other ranks, which read no files: what describes each, and its bytes."""
        if (origin := self.origin) is not None:
            return [(origin(load.key), b"") for load in step.adapter_loads]
        return [describe_packed(fetched.packed) for fetched in self.fetch(step)]

    def fetch(self, step: Step) -> tuple[Fetched, ...]:
        """The host copies of the step's loads, taken while they are sure to be there."""
        fetched = []
        for load in step.adapter_loads:
            packed = self._host_copy(load.key)
            if packed is None:
                raise RuntimeError(f"adapter {load.key} was to be loaded and is not in host memory")
            fetched.append(Fetched(load, packed))
        return tuple(fetched)

    def apply(self, step: Step, fetched: tuple[Fetched, ...]) -> None:
        """Evictions, loads, then rows that start."""
        for key in step.adapter_evictions:
            self._evict(key)
        if fetched:
            self._load(fetched)
        for start in step.starts:
            self._start(start.row, start.adapter)
        self._write_tables()

    def _evict(self, key: str) -> None:
        resident = self._resident.pop(key, None)
        if resident is not None:
            self._wait_for(resident)  # its blocks are about to be written for another use
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._key_of[slot] = None
            self._last_used[slot] = 0

    def _load(self, fetched: tuple[Fetched, ...]) -> None:
        for adapter in fetched:
            self._evict(adapter.load.key)
        if self._side is None:
            self._copy(fetched)
            copied = None
        else:  # the step in flight may still read these blocks; later steps wait for the copy in `_claim`
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                self._copy(fetched)
            copied = self._side.record_event()
        for adapter in fetched:
            resident = self._placed(adapter, copied)
            self._resident[adapter.load.key] = resident
            self.kinds |= resident.kinds

    def _copy(self, fetched: tuple[Fetched, ...]) -> None:
        for adapter in fetched:
            if adapter.packed.pieces:
                self._place(adapter)
                continue
            for first, last, block in _runs(adapter.load.block_ids):
                blocks, host = self._pool.data[block : block + last - first], adapter.packed.data[first:last]
                blocks = blocks[:, : host.shape[1]]  # other ranks may have smaller ones
                if self._staging is None:
                    # By this thread alone: torch's threads would compete with those of the pass.
                    np.copyto(blocks.numpy(), host.numpy())
                else:
                    self._staging.copy(blocks, host)

    def _place(self, adapter: Fetched) -> None:
        """Sends the adapter's matrices as they are; a kernel puts them into tiles."""
        assert self._staging is not None
        firsts = np.asarray(adapter.load.block_ids, np.int64) * self._block_elements
        for piece in adapter.packed.pieces:
            tiles = piece.tiles.copy()
            block, within = np.divmod(tiles[:, PLACE], self._block_elements)
            tiles[:, PLACE] = firsts[block] + within
            width, where = int(tiles[:, COLUMNS].max()), self._sent(tiles)
            with self._staging.sent(adapter.packed.data[piece.first : piece.last]) as numbers:
                registry.load("lora_pack", "triton").place(
                    numbers.view(piece.given), where, width, self.tables.weights
                )

    def _compile_place(self) -> None:
        """Before a request needs it, for every number format of adapter files; tiles without rows."""
        no_tiles = torch.zeros(1, 6, dtype=torch.int64, device=self._device)
        for given in SOURCES:
            registry.load("lora_pack", "triton").place(
                torch.zeros(1, dtype=given, device=self._device), no_tiles, 1, self.tables.weights
            )

    def _placed(self, adapter: Fetched, copied: torch.cuda.Event | None) -> _Resident:
        tiles = adapter.packed.tiles
        firsts = np.asarray(adapter.load.block_ids, np.int64) * self._block_elements
        return _Resident(
            tiles.sites,
            firsts[tiles.a_blocks] + tiles.a_offsets,
            firsts[tiles.b_blocks] + tiles.b_offsets,
            tiles.ranks,
            tiles.tile_ranks,
            np.array(adapter.packed.scales, np.float32),
            sum(1 << kind for kind in set(self._site_kinds[tiles.sites].tolist())),
            copied,
        )

    def _wait_for(self, resident: _Resident) -> None:
        if resident.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(resident.copied)
            resident.copied = None

    # ------------------------------------------------------------------ rows and slots

    def _start(self, row: int, key: str | None) -> None:
        before = self.row_slots[row]
        if before >= 0:
            self._rows_in[before] -= 1
        self.row_slots[row] = -1
        if key is None:
            return
        self._num_starts += 1
        slot = self._slot_of.get(key)
        if slot is None:
            slot = self._claim(key)
            self._unwritten.add(slot)
        self._last_used[slot] = self._num_starts
        self._rows_in[slot] += 1
        self.row_slots[row] = slot

    def _claim(self, key: str) -> int:
        """The least recently used slot that no row uses."""
        unused = np.flatnonzero(self._rows_in == 0)
        slot = int(unused[np.argmin(self._last_used[unused])])
        previous = self._key_of[slot]
        if previous is not None:
            del self._slot_of[previous]
        self._key_of[slot] = key
        self._slot_of[key] = slot
        self._wait_for(self._resident[key])
        return slot

    def _write_tables(self) -> None:
        slots = sorted(slot for slot in self._unwritten if self._key_of[slot] is not None)
        if not slots:
            return
        tables, num_sites = self.tables, len(self._site_kinds)
        offsets = np.zeros((2, len(slots), num_sites, MAX_TILES), np.int64)
        ranks = np.zeros((2, len(slots), num_sites), np.int32)
        scales = np.zeros((len(slots), num_sites), np.float32)
        for i, slot in enumerate(slots):
            resident = self._resident[self._key_of[slot] or ""]
            offsets[0, i, resident.sites] = resident.tile_a
            offsets[1, i, resident.sites] = resident.tile_b
            ranks[0, i, resident.sites] = resident.ranks
            ranks[1, i, resident.sites] = resident.tile_ranks
            scales[i, resident.sites] = resident.scales
        where = self._sent(np.array(slots, np.int64))
        for table, values in (
            (tables.tile_a, offsets[0]),
            (tables.tile_b, offsets[1]),
            (tables.ranks, ranks[0]),
            (tables.tile_ranks, ranks[1]),
            (tables.scales, scales),
        ):
            table.index_copy_(0, where, self._sent(values))
        self._unwritten.clear()

    def _sent(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._staging is None:
            return tensor
        sent = torch.empty_like(tensor, device=self._device)
        self._staging.copy(_as_bytes(sent), _as_bytes(tensor))
        return sent

    # ------------------------------------------------------------------ batches

    def runs_in(self, rows: np.ndarray) -> bool:
        """Whether any of these rows has an adapter."""
        return bool((self._slots(rows) >= 0).any())

    def of_tokens(self, token_rows: np.ndarray, num_tokens: int | None = None) -> LoraBatch:
        """token_rows [T]: the row of each token. With `num_tokens`: as a recorded pass of that many tokens has it."""
        return self._batch(self._tokens.fill(self._slots(token_rows), num_tokens))

    def of_wanted(self, token_rows: np.ndarray, num_tokens: int | None = None) -> LoraBatch:
        """As `of_tokens`, for the tokens whose logits are wanted."""
        return self._batch(self._wanted.fill(self._slots(token_rows), num_tokens))

    def recorded_tokens(self, num_tokens: int) -> LoraBatch:
        """What `of_tokens` fills for `num_tokens`."""
        return self._batch(self._tokens.view(num_tokens))

    def recorded_wanted(self, num_tokens: int) -> LoraBatch:
        return self._batch(self._wanted.view(num_tokens))

    def of_head(self, token_rows: np.ndarray) -> LoraBatch | None:
        """For tokens of the output head; None where no adapter so far adds to it."""
        if not self.adds_to_head or not self.runs_in(token_rows):
            return None
        buffer = SegmentBuffer(len(token_rows), len(self.row_slots), self._device, self._invariant)
        return self._batch(buffer.fill(self._slots(token_rows)))

    @property
    def adds_to_head(self) -> bool:
        return bool(self.kinds & self._head_kinds)

    @contextmanager
    def pretending(self) -> Iterator[None]:
        """Every row runs with an adapter that adds nothing, so that kernels compile before a request needs them."""
        self._pretends = True
        yield
        self._pretends = False

    def _slots(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), np.int32) if self._pretends else self.row_slots[rows]

    def _batch(self, segments: LoraSegments) -> LoraBatch:
        return LoraBatch(self.tables, segments, self.kinds)


def _as_bytes(tensor: Tensor) -> Tensor:
    """[1, bytes] uint8"""
    return tensor.view(-1).view(torch.uint8).unsqueeze(0)


def _runs(block_ids: Ints) -> Iterator[tuple[int, int, int]]:
    """Blocks that are contiguous in the pool: (first index, last index + 1, block id of the first)."""
    first = 0
    for i in range(1, len(block_ids) + 1):
        if i == len(block_ids) or block_ids[i] != block_ids[i - 1] + 1:
            yield first, i, block_ids[first]
            first = i
