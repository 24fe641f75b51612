"""The work of one step's attention, cut into equal pieces once and shared by all layers.

A plan lists items of eight integers: decodes (rows with one query) cut along their context so that every
multiprocessor gets its share, and prompts (rows with more) cut into tiles of queries. It is made on the device from
tensors alone, so a captured graph may hold it: grids follow the largest sizes, never the lengths.

Rows that begin with the same pages share a piece, so that a common prefix is read once: a decode's query tile has 16
rows and a group of heads fills few of them, the rest can hold the heads of neighbouring sequences. Sequences of one
request (samples, beams) are neighbours, and so are all under one system prompt.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.tuning import TUNINGS, AttentionTuning, HeadShape, Ranges, cache, key_of
from quire.kernels.sm_share import num_sms

MIN_SHARED = 256  # tokens; fewer are not worth a piece of their own
FEW_ROWS = 4  # per query head of a group: with fewer rows nothing is shared
COMPARED = 128  # table entries at a time


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["starts", "lens", "tables"])
def common_kernel(
    starts, lens, tables, common, stride_table, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MIN_SHARED: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """common[row]: tokens, in whole tiles, that a decode and the decode in the row before it have in the same pages.

    The newest token's page is never shared, so each row keeps work of its own. Less than MIN_SHARED counts as zero.
    """
    row = tl.program_id(0)
    before = tl.maximum(row - 1, 0)
    start = tl.load(starts + row)
    both = (row > 0) & (tl.load(starts + row + 1) - start == 1) & (start - tl.load(starts + before) == 1)
    shorter = tl.minimum(tl.load(lens + row), tl.load(lens + before))
    limit = tl.where(both, (shorter - 1) // BLOCK_SIZE, 0)  # pages
    here = tables + row.to(tl.int64) * stride_table
    there = tables + before.to(tl.int64) * stride_table
    entry = tl.arange(0, COMPARED)
    num_same = 0
    going = limit > 0
    while going:
        inside = num_same + entry < limit
        same = tl.load(here + num_same + entry, inside, -1) == tl.load(there + num_same + entry, inside, -2)
        equal = tl.min(tl.where(same, COMPARED, entry), 0)
        num_same += equal
        going = (equal == COMPARED) & (num_same < limit)
    tokens = num_same * BLOCK_SIZE // TILE * TILE
    tl.store(common + row, tl.where(tokens >= MIN_SHARED, tokens, 0))


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def group_rows(
    common, shared, row, lane, num_rows, num_before, most, MEMBERS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes shared[row] = (tokens shared, rows of the group if this row leads one, else 0); returns how many lead.

    A run of rows that share with the row before is cut into groups of up to MEMBERS; no more than `most` lead one.
    """
    alone = (tl.load(common + row, row < num_rows, 0) == 0) | (lane == 0)
    in_run = lane - tl.associative_scan(tl.where(alone, lane, 0), 0, _later)
    leads = in_run % MEMBERS == 0
    size = tl.where(row < num_rows, 1, 0)
    tokens = tl.load(common + row + 1, leads & (row + 1 < num_rows) & (lane + 1 < BLOCK), 0)
    together = leads & (tokens > 0)
    for i in tl.static_range(1, MEMBERS):
        other = tl.load(common + row + i, together & (row + i < num_rows) & (lane + i < BLOCK), 0)
        together = together & (other > 0)
        size += tl.where(together, 1, 0)
        tokens = tl.where(together, tl.minimum(tokens, other), tokens)
    leads = leads & (size > 1)
    rank = num_before + tl.cumsum(leads.to(tl.int32), 0)
    leads = leads & (rank <= most)
    tl.store(shared + row * 2, row * 0, row < num_rows)
    tl.store(shared + row * 2 + 1, row * 0, row < num_rows)
    tl.debug_barrier()
    tl.store(shared + row * 2 + 1, size, leads)
    for i in tl.static_range(0, MEMBERS):
        tl.store(shared + (row + i) * 2, tokens, leads & (i < size))
    tl.debug_barrier()
    return tl.sum(leads.to(tl.int32), 0)


# Fields of an item. COUNT is queries of a prompt; of a decode, rows from ROW on that share these pages. A row's pieces
# leave their sums in slots; PIECE says which of its row's this is, -1 where the piece is the whole row.
ROW, TOKEN, COUNT, POSITION, BEGIN, END, PIECE, NUM_SLOTS = range(8)
ITEM = 8
# Totals lie apart so that pointers to both are equally aligned, and kernels are compiled once for both.
TOTAL_STRIDE = 4
ORDERED = tl.constexpr(8)  # classes of pieces that start one after the other
MULTIPROCESSORS_WITHOUT_GPU = 4  # the interpreter runs one program after another

# One kernel with one set of tiles computes decodes and prompts, so that both give a query the same bits.
DETERMINISTIC = AttentionTuning(
    decode_tile=64, prompt_rows=64, prompt_tile=64, prompt_warps=4, prompt_stages=3
)
DETERMINISTIC_CHUNK = 512
# Tiles are sized for rows of K of this many bytes (128 × bf16); wider rows get smaller tiles.
FITTING_BYTES = 256


def fitted(tuning: AttentionTuning, head_dim: int, dtype: torch.dtype) -> AttentionTuning:
    """The tuning with tiles that fit shared memory and registers for these heads."""
    excess = max(1, padded_power(head_dim) * dtype.itemsize // FITTING_BYTES)
    # fp32 has no tensor cores: its GEMMs hold sums in registers, by more threads.
    is_full = dtype.itemsize == 4
    rows = tuning.prompt_rows // min(excess, 2) // (2 if is_full else 1)
    return replace(
        tuning,
        decode_tile=max(16, tuning.decode_tile // excess),
        prompt_tile=max(16, tuning.prompt_tile // excess),
        prompt_rows=max(16, rows),
        prompt_warps=max(tuning.prompt_warps, 8) if is_full else tuning.prompt_warps,
    )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The inputs of one step's attention kernels beside q and the pages. Valid until the next plan is made."""

    decode_items: Tensor  # [max_decode_items, 8] int32
    prompt_items: Tensor  # [max_prompt_items, 8] int32
    totals: Tensor  # [8] int32: number of decode items at 0, of prompt items at 4
    row_slots: Tensor  # [max_rows, 4] int32: first slot, number of slots and token of each row
    partial_acc: Tensor  # [max_slots, num_heads, head_dim] fp32
    partial_max: Tensor  # [max_slots, num_heads, 2] fp32: maximum and sum
    counters: Tensor  # [max_rows, num_kv_heads] int32: finished pieces, zero between launches
    num_rows: int
    num_decode_programs: int  # per KV head
    num_prompt_programs: int  # per KV head
    num_multiprocessors: int
    window: int
    chunk: int  # fixed chunk of a deterministic plan, else 0
    tuning: AttentionTuning


def padded_power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def query_rows(group: int) -> int:
    """Rows of a decode's query tile: the least that tensor cores multiply."""
    return max(16, padded_power(group))


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors of the device an engine has."""
    if device.type != "cuda":
        return MULTIPROCESSORS_WITHOUT_GPU
    return num_sms(device)


class AttentionPlanner:
    """Owns the buffers of plans: allocated once, so that graphs may be captured over them."""

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: str | torch.device,
        *,
        max_tokens: int,  # of one step, over all rows
        max_context: int = 0,  # longest context; needed by deterministic plans only
        dtype: torch.dtype = torch.bfloat16,  # of q
        deterministic: bool = False,
        tuning: AttentionTuning | None = None,
    ) -> None:
        if deterministic and max_context <= 0:
            raise ValueError("a deterministic planner needs max_context: its pieces lie at fixed positions")
        chosen = DETERMINISTIC if deterministic else tuning or AttentionTuning()
        self.tuning = fitted(chosen, head_dim, dtype)
        self.device = torch.device(device)
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.group = num_heads // num_kv_heads
        self.chunk = _fixed_chunk(max_rows, max_context) if deterministic else 0
        self.multiprocessors = multiprocessors(self.device)
        self.target = max(1, self.tuning.decode_pieces * self.multiprocessors // num_kv_heads)
        rows = max(self.tuning.prompt_rows, padded_power(self.group))
        self.tuning = replace(self.tuning, prompt_rows=rows)
        self.prompt_queries = rows // self.group
        # Rows whose queries fit one tile may read pages together. Fixed pieces are each row's own.
        self.members = 1 if deterministic else query_rows(self.group) // padded_power(self.group)
        items = max_rows * -(-max_context // self.chunk) if deterministic else max_rows + self.target
        slots = items if self.members == 1 else 2 * max_rows + self.members * self.target
        self._max_prompt_items = self._prompt_bound(max_rows, max_tokens)
        self._max_decode_items = items
        self._partial_acc = self._empty(slots, num_heads, head_dim, dtype=torch.float32)
        self._partial_max = self._empty(slots, num_heads, 2, dtype=torch.float32)
        self._counters = torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=self.device)
        self._common = self._empty(max_rows)
        self._shared = torch.zeros(max_rows, 2, dtype=torch.int32, device=self.device)
        # A step of a model with two kinds of windows has two plans alive at once.
        self._lists: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory that partial sums take."""
        return self._partial_acc.nbytes + self._partial_max.nbytes

    def plan(
        self,
        query_starts: Tensor,  # [num_rows + 1] int32
        context_lens: Tensor,  # [num_rows] int32
        num_rows: int,
        *,
        window: int = 0,
        num_tokens: int | None = None,  # of this step; the largest if unknown
        block_tables: Tensor | None = None,  # [num_rows, max_blocks] int32, to find pages that rows share
        block_size: int = 0,
    ) -> AttentionPlan:
        """Lists the work of these rows, on the device. Invalidates the last plan with this window."""
        if num_rows > self.max_rows:
            raise ValueError(
                f"{num_rows} rows, but this planner was made for {self.max_rows}: raise max_rows"
            )
        num_tokens = self.max_tokens if num_tokens is None else min(num_tokens, self.max_tokens)
        decode_items, prompt_items, totals, row_slots = self._lists_of(window)
        tuning, fixed = self.tuning, self.chunk > 0
        # Few rows with wide groups lose more in adding up pieces than they save: measured on an H200.
        pays = num_rows >= FEW_ROWS * self.group and not window
        members = self.members if pays and block_tables is not None else 1
        if members > 1 and block_tables is not None:
            common_kernel[(num_rows,)](
                query_starts, context_lens, block_tables, self._common, block_tables.stride(0),
                BLOCK_SIZE=block_size, TILE=tuning.decode_tile, MIN_SHARED=MIN_SHARED, COMPARED=COMPARED,
                num_warps=1,
            )  # fmt: skip
        _plan_kernel[(1,)](
            query_starts, context_lens, decode_items, prompt_items, totals, row_slots, self._common, self._shared,
            num_rows, self.target, MEMBERS=members,
            ITEM=ITEM, TOTAL_STRIDE=TOTAL_STRIDE, WINDOW=window, CHUNK=self.chunk,
            DECODE_TILE=tuning.decode_tile,
            PROMPT_TILE=tuning.prompt_tile,
            PROMPT_QUERIES=self.prompt_queries, BLOCK=min(1024, padded_power(max(16, self.max_rows))),
            num_warps=4,
        )  # fmt: skip
        bound = num_rows + self.target if not fixed else self._max_decode_items
        return AttentionPlan(
            decode_items, prompt_items, totals, row_slots,
            self._partial_acc, self._partial_max, self._counters,
            num_rows, bound, self._prompt_bound(num_rows, num_tokens), self.multiprocessors,
            window, self.chunk, tuning,
        )  # fmt: skip

    def _prompt_bound(self, num_rows: int, num_tokens: int) -> int:
        # A row of a prompt has two tokens or more.
        return num_tokens // self.prompt_queries + min(num_rows, num_tokens // 2)

    def _lists_of(self, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if window not in self._lists:
            self._lists[window] = (
                self._empty(self._max_decode_items, ITEM),
                self._empty(max(1, self._max_prompt_items), ITEM),
                torch.zeros(2 * TOTAL_STRIDE, dtype=torch.int32, device=self.device),
                self._empty(self.max_rows, 4),
            )
        return self._lists[window]

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _fixed_chunk(max_rows: int, max_context: int) -> int:
    # Depends on the configuration alone, never on a batch. Long contexts of many rows would need too many sums.
    chunk = DETERMINISTIC_CHUNK
    while max_rows * -(-max_context // chunk) > 16384 and chunk < max_context:
        chunk *= 2
    return chunk


@triton.jit
def _write(items, at, mask, row, token, count, position, begin, end, first, number, ITEM: tl.constexpr):
    place = items + at * ITEM
    tl.store(place, row, mask)
    tl.store(place + 1, token, mask)
    tl.store(place + 2, count, mask)
    tl.store(place + 3, position, mask)
    tl.store(place + 4, begin, mask)
    tl.store(place + 5, end, mask)
    tl.store(place + 6, first, mask)
    tl.store(place + 7, number, mask)


@triton.jit
def _decode_rows(
    starts, lens, shared, row, num_rows, WINDOW: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr
):
    """(first key, tokens, tiles) of each row in a block; no tiles where the row is not a decode.

    What a row shares with others comes before its first key.
    """
    inside = row < num_rows
    queries = tl.load(starts + row + 1, inside, 0) - tl.load(starts + row, inside, 0)
    length = tl.load(lens + row, inside, 0)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    if MEMBERS > 1:
        first = tl.load(shared + row * 2, inside, 0)
    tiles = tl.where(queries == 1, (length - first + TILE - 1) // TILE, 0)
    return first, length, tiles


@triton.jit
def _cut(tiles, piece):
    """(pieces, tiles of each): of equal size, since a short rest costs as much to start as a long piece."""
    number = (tiles + piece - 1) // piece
    width = (tiles + tl.maximum(number, 1) - 1) // tl.maximum(number, 1)
    return (tiles + tl.maximum(width, 1) - 1) // tl.maximum(width, 1), width


@triton.jit
def _longest_first(number, width):
    """The index of each row's first piece, roughly in the order of falling width.

    Programs start in the order of their items: the last to start should be short, or the device waits for them.
    """
    widest = tl.maximum(tl.max(tl.where(number > 0, width, 0)), 1)
    rank = ORDERED - 1 - tl.minimum(width, widest) * (ORDERED - 1) // widest  # 0: the widest
    index = number * 0
    placed = 0
    for which in tl.static_range(ORDERED):
        pieces = tl.where(rank == which, number, 0)
        index = tl.where(rank == which, placed + tl.cumsum(pieces, 0) - pieces, index)
        placed += tl.sum(pieces)
    return index


# A count of 1 or of a multiple of 16 must not compile another kernel.
@triton.jit(do_not_specialize=["num_rows", "target"], do_not_specialize_on_alignment=["starts", "lens"])
def _plan_kernel(
    starts, lens, decode_items, prompt_items, totals, row_slots, common, shared, num_rows, target,
    MEMBERS: tl.constexpr,
    ITEM: tl.constexpr, TOTAL_STRIDE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    DECODE_TILE: tl.constexpr, PROMPT_TILE: tl.constexpr, PROMPT_QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    num_tiles = 0
    num_leaders = num_rows * 0
    for block in range(0, num_rows, BLOCK):
        row = block + lane
        if MEMBERS > 1:
            num_leaders += group_rows(
                common, shared, row, lane, num_rows, num_leaders, target * 3 // 4, MEMBERS, BLOCK
            )
        _, _, tiles = _decode_rows(starts, lens, shared, row, num_rows, WINDOW, DECODE_TILE, MEMBERS)
        num_tiles += tl.sum(tiles)
        if MEMBERS > 1:
            leads = tl.load(shared + row * 2 + 1, row < num_rows, 0) > 0
            num_tiles += (
                tl.sum(tl.where(leads, tl.load(shared + row * 2, row < num_rows, 0), 0)) // DECODE_TILE
            )
    # A group's pieces are items too, and the grid has room for `target` beside one for each row.
    room = target - num_leaders
    piece = tl.maximum((num_tiles + room - 1) // room, 1)
    num_decode, num_prompt, num_slots = 0, 0, target * 0
    for block in range(0, num_rows, BLOCK):
        row = block + lane
        first, length, tiles = _decode_rows(starts, lens, shared, row, num_rows, WINDOW, DECODE_TILE, MEMBERS)
        token = tl.load(starts + row, row < num_rows, 0)
        if CHUNK > 0:
            number = tl.where(tiles > 0, (length + CHUNK - 1) // CHUNK - first // CHUNK, 0)
            width = tiles * 0 + CHUNK
            origin = first // CHUNK * CHUNK
        else:
            number, width = _cut(tiles, piece)
            # Padding gets a piece without keys, which writes zeros.
            after = tl.load(starts + row + 1, row < num_rows, 0)
            number = tl.where((after - token == 1) & (length == 0), 1, number)
            width = width * DECODE_TILE
            origin = first
        ahead = number * 0  # pieces that a row shares; its slots for them come first
        if MEMBERS > 1:
            members = tl.load(shared + row * 2 + 1, row < num_rows, 0)
            ahead, common_width = _cut(first // DECODE_TILE, piece)
            pieces = tl.where(members > 0, ahead, 0)
            at = num_decode + tl.cumsum(pieces, 0) - pieces
            for j in range(tl.max(pieces, 0)):
                begin = j * common_width * DECODE_TILE
                end = tl.minimum(begin + common_width * DECODE_TILE, first)
                _write(
                    decode_items, at + j, j < pieces, row, token, members, length - 1, begin, end,
                    begin * 0 + j, ahead + number, ITEM,
                )  # fmt: skip
            num_decode += tl.sum(pieces)
        at = num_decode + _longest_first(number, width)
        slots = ahead + number
        tl.store(row_slots + row * 4, num_slots + tl.cumsum(slots, 0) - slots, row < num_rows)
        tl.store(row_slots + row * 4 + 1, slots, row < num_rows)
        tl.store(row_slots + row * 4 + 2, token, row < num_rows)
        for j in range(tl.max(number, 0)):
            begin = tl.maximum(origin + j * width, first)
            end = tl.minimum(origin + (j + 1) * width, length)
            which = tl.where(slots > 1, ahead + j, -1)
            _write(
                decode_items, at + j, j < number, row, token, row * 0 + 1, length - 1, begin, end, which, slots,
                ITEM,
            )  # fmt: skip
        num_decode += tl.sum(number)
        num_slots += tl.sum(slots)

        queries = tl.load(starts + row + 1, row < num_rows, 0) - token
        number = tl.where((queries > 1) & (length > 0), (queries + PROMPT_QUERIES - 1) // PROMPT_QUERIES, 0)
        at = num_prompt + tl.cumsum(number, 0) - number
        for j in range(tl.max(number, 0)):
            # The last tile of a row sees the most: heavy programs first.
            skipped = (number - 1 - j) * PROMPT_QUERIES
            count = tl.minimum(queries - skipped, PROMPT_QUERIES)
            position = length - queries + skipped
            begin = position * 0
            if WINDOW > 0:
                begin = tl.maximum(position - WINDOW + 1, 0) // PROMPT_TILE * PROMPT_TILE
            _write(
                prompt_items, at + j, j < number, row, token + skipped, count, position, begin,
                position + count, begin * 0 - 1, begin * 0 + 1, ITEM,
            )  # fmt: skip
        num_prompt += tl.sum(number)
    tl.store(totals, num_decode)
    tl.store(totals + TOTAL_STRIDE, num_prompt)


class StepPlanner:
    """Plans by an AttentionPlanner per range of rows; each owns its buffers, so all may be captured."""

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: str | torch.device,
        *,
        block_size: int | None = None,  # without it or the next, measured tiles cannot be looked up
        kv_dtype: str | None = None,  # as the pool's layout names it
        dtype: torch.dtype = torch.bfloat16,  # of q
        deterministic: bool = False,
        **settings: Any,
    ) -> None:
        """The rest as AttentionPlanner has it. A deterministic plan has one tuning for all."""
        self._block_size = block_size or 0
        measured = None
        if block_size is not None and kv_dtype is not None and not deterministic:
            group = num_heads // num_kv_heads
            heads = HeadShape(num_kv_heads, group, head_dim, kv_dtype, dtype.itemsize, block_size)
            measured = cache.load(key_of(heads, device))
        # Where the tiles come from, for the start's report.
        self.tiles = "fixed" if deterministic else "default" if measured is None else "tuned"
        ranges: Ranges = TUNINGS if measured is None else measured.ranges
        self._planners: list[tuple[int, AttentionPlanner]] = []
        for limit, tuning in ranges:
            rows = max_rows if deterministic else min(limit, max_rows)
            planner = AttentionPlanner(
                rows, num_heads, num_kv_heads, head_dim, device,
                dtype=dtype, deterministic=deterministic, tuning=tuning, **settings,
            )  # fmt: skip
            self._planners.append((rows, planner))
            if rows == max_rows:
                break

    @property
    def range_sizes(self) -> tuple[int, ...]:
        """The most rows of each range: one step of each size compiles all kernels."""
        return tuple(rows for rows, _ in self._planners)

    def plan(
        self,
        query_starts: Tensor,  # [num_rows + 1] int32
        context_lens: Tensor,  # [num_rows] int32
        num_rows: int,
        *,
        window: int = 0,
        num_tokens: int | None = None,
        block_tables: Tensor | None = None,  # [num_rows, max_blocks] int32
    ) -> AttentionPlan:
        planner = next(planner for rows, planner in self._planners if num_rows <= rows)
        shared = block_tables if self._block_size else None
        return planner.plan(
            query_starts, context_lens, num_rows,
            window=window, num_tokens=num_tokens, block_tables=shared, block_size=self._block_size,
        )  # fmt: skip
