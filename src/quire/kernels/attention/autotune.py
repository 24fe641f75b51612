"""Measures tiles of attention on this GPU, and replaces the defaults only where others are faster beyond doubt.

Candidates are measured for each range of rows, on batches like those of its steps.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import registry
from quire.kernels.attention.tuning import TUNINGS, AttentionTuning, HeadShape, MeasuredTiles, TunedTiles
from quire.kernels.measurement import choose, graph_seconds, overall

WINDOW = 100  # windowed kernels are compiled apart: the chosen tiles must run in them too
MAX_ERROR = {2: 1e-2, 4: 1e-4}  # ‖difference‖ / ‖default's result‖, by the bytes of a number
MIN_FREE_BYTES = 512 << 20
LAYERS = 32  # calls per plan, as in a model
GEMM_WIDTH = 6144  # of the GEMMs between the calls, which take about as long
MAX_LAYERS = 256  # of a pool
CACHE_SHARES = 3  # the pool's size in multiples of the GPU's cache: a model's weights evict all KV from it
USUAL_CACHE_BYTES = 64 << 20

Clock = Callable[[Callable[[], None]], float]  # seconds that the launches of a function take


@dataclass(frozen=True, slots=True)
class BatchLengths:
    """A batch: each row's context, and how many of its last tokens are queries."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]

    def shortened(self, share: float) -> "BatchLengths":
        """Contexts that take about this share of the memory."""
        contexts = tuple(
            max(count, int(context * share))
            for context, count in zip(self.contexts, self.queries, strict=True)
        )
        return BatchLengths(contexts, self.queries)


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A choice to make: one of these candidates, by its times on these batches."""

    what: str
    max_rows: int  # of the range it is for; 0: prompts, in every range
    batches: tuple[BatchLengths, ...]
    candidates: tuple[AttentionTuning, ...]  # the default first

    def words(self, tuning: AttentionTuning) -> str:
        """The sizes that this choice is about, for reports."""
        if self.max_rows:
            sizes = (tuning.decode_tile, tuning.decode_warps, tuning.decode_stages)
            return "tile {}, {} warps, {} stages".format(*sizes) + f", {tuning.decode_pieces} pieces"
        sizes = (tuning.prompt_tile, tuning.prompt_warps, tuning.prompt_stages)
        return "tile {}, {} warps, {} stages".format(*sizes) + f", {tuning.prompt_rows} rows"


def _decodes(*contexts: int) -> BatchLengths:
    return BatchLengths(contexts, (1,) * len(contexts))


def _ragged(rows: int, mean: int = 500) -> BatchLengths:
    """BatchLengths like those of running conversations: a long tail, between 10 and 2000."""
    numbers = random.Random(1)
    draws = [numbers.lognormvariate(0.0, 0.9) for _ in range(rows)]
    scale = mean * rows / sum(draws)
    return _decodes(*(min(2000, max(10, int(draw * scale))) for draw in draws))


def _decode_choice(
    what: str, index: int, batches: tuple[BatchLengths, ...], *sizes: tuple[int, ...]
) -> TileChoice:
    max_rows, default = TUNINGS[index]
    others = (
        replace(default, decode_tile=tile, decode_warps=warps, decode_stages=stages, decode_pieces=pieces)
        for tile, warps, stages, pieces in sizes
    )
    return TileChoice(what, max_rows, batches, (default, *others))


def _prompt_choice(what: str, batches: tuple[BatchLengths, ...], *sizes: tuple[int, ...]) -> TileChoice:
    default = TUNINGS[0][1]
    others = (
        replace(default, prompt_rows=rows, prompt_tile=tile, prompt_warps=warps, prompt_stages=stages)
        for rows, tile, warps, stages in sizes
    )
    return TileChoice(what, 0, batches, (default, *others))


# At most eight each, the default included. A candidate is compiled once, and pieces need no compiling.
TILE_CHOICES = (
    _decode_choice(
        "decodes, 1 to 16 rows", 0,
        (_decodes(1024), _decodes(8192), _decodes(*[1024] * 16)),
        (32, 2, 2, 8), (32, 2, 3, 16), (32, 4, 2, 16), (64, 2, 2, 16), (64, 2, 3, 16), (64, 4, 3, 16), (128, 4, 2, 16),
    ),
    _decode_choice(
        "decodes, more rows", 1,
        (_decodes(*[2048] * 64), _ragged(128), _ragged(512), _ragged(1000, 200)),
        (64, 2, 2, 8), (64, 2, 3, 8), (32, 2, 3, 8), (32, 2, 4, 16), (64, 4, 3, 8), (128, 4, 2, 8), (128, 4, 3, 8),
    ),
    _prompt_choice(
        # Long fresh prompts have a kernel of their own: short ones, and chunks with a context before them.
        "prompts",
        (BatchLengths((128,) * 16, (128,) * 16), BatchLengths((2048,), (512,)), BatchLengths((512,) * 4, (512,) * 4)),
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
    scales: Tensor | None = None  # [num_blocks, layers, Hkv, 2, block_size] of a pool in int8

    def launches(self, tuning: AttentionTuning, calls: int = 1, window: int = 0) -> Callable[[], None]:
        """A function that runs attention in `calls` layers, with a new plan every LAYERS.

        On a GPU a GEMM follows each call, as in a model: its power draw lowers the clock for attention too.
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
                layer, scales = call % layers, {}
                k, v = self.pool[:, layer, 0], self.pool[:, layer, 1]
                if self.scales is not None:
                    scales = {
                        "k_scales": self.scales[:, layer, :, 0],
                        "v_scales": self.scales[:, layer, :, 1],
                    }
                kernels.paged_attention(
                    self.q, k, v, self.query_starts, self.context_lens, self.block_tables, head_dim**-0.5,
                    window, self.out, plan=plan, max_query_len=self.max_query_len, **scales,
                )  # fmt: skip
                if self.weight is not None:
                    torch.mm(self.weight[:tokens], self.weight.t())

        return run

    def result(self, tuning: AttentionTuning, window: int = 0) -> Tensor:
        """The first layer's result with these tiles."""
        self.out.fill_(float("nan"))
        self.launches(tuning, 1, window)()
        return self.out.clone()


def make_batch(
    heads: HeadShape, query_dtype: torch.dtype, lengths: BatchLengths, device: torch.device, max_bytes: int
) -> TimedBatch:
    """Random numbers over shuffled blocks, in at most `max_bytes`."""
    kv_dtype: torch.dtype = getattr(torch, heads.kv_dtype)
    token_bytes = 2 * heads.num_kv_heads * heads.head_dim * kv_dtype.itemsize
    if sum(lengths.contexts) * token_bytes > max_bytes:
        lengths = lengths.shortened(max_bytes / (sum(lengths.contexts) * token_bytes))
    counts = [-(-context // heads.block_size) for context in lengths.contexts]
    layers = _num_layers(sum(counts) * heads.block_size * token_bytes, device, max_bytes)
    shape = (sum(counts) + 1, layers, 2, heads.block_size, heads.num_kv_heads, heads.head_dim)
    # Few dtypes can be sampled; all can be converted to.
    values = torch.empty(shape, dtype=kv_dtype if kv_dtype.itemsize > 1 else torch.float16, device=device)
    scales, spread = None, 1.0
    if kv_dtype is torch.int8:
        blocks, spread = (shape[0], layers, heads.num_kv_heads, 2, heads.block_size), 25.0
        scales = torch.full(blocks, 1 / spread, dtype=torch.bfloat16, device=device)
    pool = values.normal_(std=spread).to(kv_dtype)
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
        weight=_gemm_weight(query_dtype, device),
        scales=scales,
    )


def _gemm_weight(dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if device.type != "cuda":
        return None
    return torch.randn(GEMM_WIDTH, GEMM_WIDTH, dtype=dtype, device=device) / GEMM_WIDTH**0.5


def _num_layers(layer_bytes: int, device: torch.device, max_bytes: int) -> int:
    """Enough layers to make the pool larger than the GPU's cache, if they fit."""
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or USUAL_CACHE_BYTES
    wanted = -(-CACHE_SHARES * cache_bytes // layer_bytes)
    return max(1, min(wanted, MAX_LAYERS, max_bytes // layer_bytes))


def tune(
    heads: HeadShape,
    query_dtype: torch.dtype,
    device: str | torch.device,
    say: Callable[[str], None],
    *,
    choices: Sequence[TileChoice] = TILE_CHOICES,
    clock: Clock | None = None,  # graph_seconds if None
    calls: int = LAYERS,
) -> TunedTiles:
    """Measures every choice; `say` reports each candidate. Takes seconds, and a second per kernel to compile."""
    device = torch.device(device)
    _check(heads)
    chosen: dict[int, AttentionTuning] = {}
    measured = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        for choice in choices:
            limit = _pool_bytes(device)
            batches = [make_batch(heads, query_dtype, lengths, device, limit) for lengths in choice.batches]
            chosen[choice.max_rows], line = _tune_choice(choice, batches, clock or graph_seconds, calls, say)
            measured.append(line)
    prompts = chosen.pop(0)
    ranges = tuple((max_rows, _with_prompts(decodes, prompts)) for max_rows, decodes in chosen.items())
    return TunedTiles(ranges, tuple(measured))


def _tune_choice(
    choice: TileChoice, batches: list[TimedBatch], clock: Clock, calls: int, say: Callable[[str], None]
) -> tuple[AttentionTuning, MeasuredTiles]:
    """The tiles for one choice, and their report."""
    candidates = _distinct(choice.candidates, batches[0])
    measure = partial(_times, batches=batches, clock=clock, calls=calls)
    times = _measured(choice, candidates, batches, measure, say)
    while best := choose(times):
        # The fastest of many was also lucky: it must win once more, alone against the default.
        again = _alternated(candidates[0], candidates[best], measure)
        reason = "not faster when measured again" if not choose(again) else ""
        reason = reason or _window_fault(candidates[best], candidates[0], batches)
        if not reason:
            default_us, best_us = overall(again[0]) * 1e6, overall(again[1]) * 1e6
            words = choice.words(candidates[best])
            return candidates[best], MeasuredTiles(choice.what, default_us, best_us, words)
        say(f"{choice.what}: {choice.words(candidates[best])}: passed over, {reason}")
        del times[best]
    default_us, best_us = overall(times[0]) * 1e6, min(map(overall, times.values())) * 1e6
    return candidates[0], MeasuredTiles(choice.what, default_us, best_us, "default")


def _measured(
    choice: TileChoice,
    candidates: list[AttentionTuning],
    batches: list[TimedBatch],
    measure: Callable[[AttentionTuning], list[float]],
    say: Callable[[str], None],
) -> dict[int, list[list[float]]]:
    """Times of each candidate that runs and agrees with the default."""
    expected = [batch.result(candidates[0]) for batch in batches]
    times: dict[int, list[list[float]]] = {}
    for index, tuning in enumerate(candidates):
        where = f"{choice.what}, {index + 1} of {len(candidates)}: {choice.words(tuning)}"
        reason = _fault(tuning, batches, expected) if index else ""
        if reason:
            say(f"{where}: passed over, {reason}")
            continue
        times[index] = [measure(tuning)]
        say(f"{where}: {overall(times[index]) * 1e6:.2f} µs")
    # Backwards, so that a drifting clock cannot favour a candidate twice.
    for index in reversed(times):
        times[index].append(measure(candidates[index]))
    return times


def _alternated(
    default: AttentionTuning, other: AttentionTuning, measure: Callable[[AttentionTuning], list[float]]
) -> dict[int, list[list[float]]]:
    """Two new rounds of the two alone, as `choose` takes them."""
    first = measure(default), measure(other)
    last = measure(other), measure(default)
    return {0: [first[0], last[1]], 1: [first[1], last[0]]}


def _distinct(candidates: tuple[AttentionTuning, ...], batch: TimedBatch) -> list[AttentionTuning]:
    """Candidates that differ for these heads: wide heads get smaller tiles."""
    plans = registry.load("attention", "triton_plan")
    head_dim, dtype = batch.q.shape[2], batch.q.dtype
    seen: dict[AttentionTuning, AttentionTuning] = {}
    for tuning in candidates:
        seen.setdefault(plans.fitted(tuning, head_dim, dtype), tuning)
    return list(seen.values())


def _times(tuning: AttentionTuning, batches: list[TimedBatch], clock: Clock, calls: int) -> list[float]:
    """Seconds per layer on each batch. Every layer of a pool is read before one is read again."""
    seconds = []
    for batch in batches:
        num_calls = max(calls, batch.pool.shape[1])
        seconds.append(clock(batch.launches(tuning, num_calls)) / num_calls)
    return seconds


def _fault(
    tuning: AttentionTuning, batches: list[TimedBatch], expected: list[Tensor], window: int = 0
) -> str:
    """Why these tiles cannot serve; empty if they can. Tiles that do not fit the GPU are no error."""
    for batch, wanted in zip(batches, expected, strict=True):
        try:
            result = batch.result(tuning, window)
        except Exception as fault:  # compilers and drivers have many
            return (str(fault).splitlines() or [type(fault).__name__])[0][:100]
        error = float((result.float() - wanted.float()).norm() / wanted.float().norm())
        if not error <= MAX_ERROR[result.dtype.itemsize]:
            return f"its results are off by {error:.1e}"
    return ""


def _window_fault(tuning: AttentionTuning, default: AttentionTuning, batches: list[TimedBatch]) -> str:
    return _fault(tuning, batches[:1], [batches[0].result(default, WINDOW)], WINDOW)


def _with_prompts(decodes: AttentionTuning, prompts: AttentionTuning) -> AttentionTuning:
    names = [field.name for field in fields(AttentionTuning) if field.name.startswith("prompt_")]
    return replace(decodes, **{name: getattr(prompts, name) for name in names})


def _check(heads: HeadShape) -> None:
    limit = registry.load("attention", "triton").MAX_HEAD_DIM
    if heads.head_dim > limit:
        raise ConfigError(f"heads of {heads.head_dim} are too wide for these kernels, which go up to {limit}")


def _pool_bytes(device: torch.device) -> int:
    """Memory for each batch's pool, so that a choice's four fit, with the random numbers before conversion."""
    if device.type != "cuda":
        return MIN_FREE_BYTES
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"only {free >> 20} MiB of GPU memory are free: stop what else runs there, its load would falsify times"
        )
    return free // 8
