"""What tuning measures: candidates for each range of rows, and batches that are like its steps."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels import registry
from quire.kernels.attention.tuned import HeadShape
from quire.kernels.attention.tuning import TUNINGS, Tuning

LAYERS = 32  # calls per plan, as in a model
PRODUCT_WIDTH = 6144  # of the products between them, which take about as long
MAX_LAYERS = 256  # of a pool
CACHE_SHARES = 3  # a pool is so many times the chip's cache: a model's weights leave nothing of KV in it
USUAL_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """A batch, by its rows' contexts and how many of their last tokens are queries."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]

    def shortened(self, share: float) -> "Lengths":
        """Contexts that take this share of the memory, about."""
        contexts = tuple(
            max(count, int(context * share))
            for context, count in zip(self.contexts, self.queries, strict=True)
        )
        return Lengths(contexts, self.queries)


@dataclass(frozen=True, slots=True)
class Subject:
    """A choice to be made: one of these candidates, by its times on these batches."""

    what: str
    max_rows: int  # of the range it is for; 0: prompts, in every range
    batches: tuple[Lengths, ...]
    candidates: tuple[Tuning, ...]  # the default first

    def words(self, tuning: Tuning) -> str:
        """What is chosen, in words."""
        if self.max_rows:
            sizes = (tuning.decode_tile, tuning.decode_warps, tuning.decode_stages)
            return "tile {}, {} warps, {} stages".format(*sizes) + f", {tuning.decode_pieces} pieces"
        sizes = (tuning.prompt_tile, tuning.prompt_warps, tuning.prompt_stages)
        return "tile {}, {} warps, {} stages".format(*sizes) + f", {tuning.prompt_rows} rows"


def _decodes(*contexts: int) -> Lengths:
    return Lengths(contexts, (1,) * len(contexts))


def _ragged(rows: int, mean: int = 500) -> Lengths:
    """Lengths like those of running conversations: a long tail, between 10 and 2000."""
    numbers = random.Random(1)
    draws = [numbers.lognormvariate(0.0, 0.9) for _ in range(rows)]
    scale = mean * rows / sum(draws)
    return _decodes(*(min(2000, max(10, int(draw * scale))) for draw in draws))


def _decode_subject(what: str, index: int, batches: tuple[Lengths, ...], *sizes: tuple[int, ...]) -> Subject:
    max_rows, default = TUNINGS[index]
    others = (
        replace(default, decode_tile=tile, decode_warps=warps, decode_stages=stages, decode_pieces=pieces)
        for tile, warps, stages, pieces in sizes
    )
    return Subject(what, max_rows, batches, (default, *others))


def _prompt_subject(what: str, batches: tuple[Lengths, ...], *sizes: tuple[int, ...]) -> Subject:
    default = TUNINGS[0][1]
    others = (
        replace(default, prompt_rows=rows, prompt_tile=tile, prompt_warps=warps, prompt_stages=stages)
        for rows, tile, warps, stages in sizes
    )
    return Subject(what, 0, batches, (default, *others))


# At most eight each, the default included. A candidate is compiled once, and pieces need no compiling.
SUBJECTS = (
    _decode_subject(
        "decodes, 1 to 16 rows", 0,
        (_decodes(1024), _decodes(8192), _decodes(*[1024] * 16)),
        (32, 2, 2, 8), (32, 2, 3, 16), (32, 4, 2, 16), (64, 2, 2, 16), (64, 2, 3, 16), (64, 4, 3, 16), (128, 4, 2, 16),
    ),
    _decode_subject(
        "decodes, more rows", 1,
        (_decodes(*[2048] * 64), _ragged(128), _ragged(512), _ragged(1000, 200)),
        (64, 2, 2, 8), (64, 2, 3, 8), (32, 2, 3, 8), (32, 2, 4, 16), (64, 4, 3, 8), (128, 4, 2, 8), (128, 4, 3, 8),
    ),
    _prompt_subject(
        # Long fresh prompts have a kernel of their own: short ones, and chunks with a context before them.
        "prompts", (Lengths((128,) * 16, (128,) * 16), Lengths((2048,), (512,)), Lengths((512,) * 4, (512,) * 4)),
        (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2),
        (64, 32, 4, 3),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """A batch over a page-major pool of many layers."""

    q: Tensor  # [T, Hq, D]
    pool: Tensor  # [num_blocks, layers, 2, block_size, Hkv, D]
    query_starts: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    block_tables: Tensor  # [R, max_blocks] int32
    out: Tensor  # [T, Hq * D]
    max_query_len: int
    weight: Tensor | None = None  # [width, width]; None: nothing runs between the calls

    def launches(self, tuning: Tuning, calls: int = 1, window: int = 0) -> Callable[[], None]:
        """What runs attention in so many layers, with a plan for each model's worth of them.

        On a GPU a product follows each, as in a model: it takes power, and the chip's clock falls for attention, too.
        """
        kernels = registry.load("attention", "triton")
        tokens, num_heads, head_dim = self.q.shape
        rows, (layers, kv_heads) = self.context_lens.shape[0], (self.pool.shape[1], self.pool.shape[4])
        planner = kernels.AttentionPlanner(
            rows, num_heads, kv_heads, head_dim, self.q.device,
            max_tokens=tokens, dtype=self.q.dtype, tuning=tuning,
        )  # fmt: skip

        def run() -> None:
            plan = None
            for call in range(calls):
                if call % LAYERS == 0:
                    plan = planner.plan(self.query_starts, self.context_lens, rows, window=window)
                k, v = self.pool[:, call % layers, 0], self.pool[:, call % layers, 1]
                kernels.paged_attention(
                    self.q, k, v, self.query_starts, self.context_lens, self.block_tables, head_dim**-0.5,
                    window, self.out, plan=plan, max_query_len=self.max_query_len,
                )  # fmt: skip
                if self.weight is not None:
                    torch.mm(self.weight[:tokens], self.weight.t())

        return run

    def result(self, tuning: Tuning, window: int = 0) -> Tensor:
        """What the first layer gives with these tiles."""
        self.out.fill_(float("nan"))
        self.launches(tuning, 1, window)()
        return self.out.clone()


def make_batch(
    heads: HeadShape, query_dtype: torch.dtype, lengths: Lengths, device: torch.device, max_bytes: int
) -> TimedBatch:
    """Random numbers over shuffled blocks, in at most so much memory."""
    kv_dtype: torch.dtype = getattr(torch, heads.kv_dtype)
    token_bytes = 2 * heads.num_kv_heads * heads.head_dim * kv_dtype.itemsize
    if sum(lengths.contexts) * token_bytes > max_bytes:
        lengths = lengths.shortened(max_bytes / (sum(lengths.contexts) * token_bytes))
    counts = [-(-context // heads.block_size) for context in lengths.contexts]
    layers = _num_layers(sum(counts) * heads.block_size * token_bytes, device, max_bytes)
    shape = (sum(counts) + 1, layers, 2, heads.block_size, heads.num_kv_heads, heads.head_dim)
    # Few number formats can be drawn; all can be converted to.
    drawn = torch.empty(shape, dtype=kv_dtype if kv_dtype.itemsize > 1 else torch.float16, device=device)
    pool = drawn.normal_().to(kv_dtype)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    order = torch.randperm(sum(counts), dtype=torch.int32) + 1
    for row, ids in enumerate(order.split(counts)):
        tables[row, : len(ids)] = ids
    num_heads, num_tokens = heads.num_kv_heads * heads.group, sum(lengths.queries)
    return TimedBatch(
        q=torch.randn(num_tokens, num_heads, heads.head_dim, dtype=query_dtype, device=device),
        pool=pool,
        query_starts=torch.tensor([0, *lengths.queries]).cumsum(0).int().to(device),
        context_lens=torch.tensor(lengths.contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        out=torch.empty(num_tokens, num_heads * heads.head_dim, dtype=query_dtype, device=device),
        max_query_len=max(lengths.queries),
        weight=_product(query_dtype, device),
    )


def _product(dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if device.type != "cuda":
        return None
    return torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype=dtype, device=device) / PRODUCT_WIDTH**0.5


def _num_layers(layer_bytes: int, device: torch.device, max_bytes: int) -> int:
    """As many as make the pool larger than the chip's cache, if they fit."""
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or USUAL_CACHE_BYTES
    wanted = -(-CACHE_SHARES * cache_bytes // layer_bytes)
    return max(1, min(wanted, MAX_LAYERS, max_bytes // layer_bytes))
