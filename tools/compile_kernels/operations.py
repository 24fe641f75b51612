"""Operations around a model's layers: inputs, sampling, pages, trees; and attention's forms that are measured only."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.draft import MAX_NODES
from quire.core.layout import BlockLayout
from quire.kernels import registry
from quire.kernels.attention.tuning import AttentionTuning
from quire.kernels.lora.records import SOURCES
from quire.kernels.moe.records import AwayExperts, Routing
from quire.kernels.packed_attention.reference import BLOCK
from quire.kernels.sample.columns import WORDS
from quire.layers.attention import Pool
from tools.compile_kernels.models import MAX_CONTEXT, MAX_ROWS, META, MODELS, NUM_BLOCKS, ints
from tools.compile_kernels.record import Recorder

VOCABULARIES = sorted({int(model["vocab_size"]) for model in MODELS.values()})
LAYOUTS = (
    BlockLayout(32, 16, 8, 128, "bfloat16"),
    BlockLayout(30, 16, 3, 64, "bfloat16"),
    BlockLayout(32, 16, 8, 128, "int8"),
)
TOKENS_OF_TREES = 16


@dataclass(frozen=True, slots=True)
class _Columns:
    """Rows' sampling parameters, as the kernels read them."""

    packed: Tensor


def launch_operations(recorder: Recorder) -> None:
    """What a step launches beside the model."""
    for launch in (
        _inputs,
        _sampling,
        _choices,
        _pages,
        _adapters,
        _trees,
        _away,
        _ranks,
        _measured_attention,
        _training,
    ):
        launch(recorder)


def _inputs(recorder: Recorder) -> None:
    recorder.case = "inputs"
    kernel: Any = registry.load("inputs", "triton")
    for block_size in (1, 16, 128):
        tokens, tables = ints(MAX_ROWS, MAX_CONTEXT), ints(MAX_ROWS, -(-MAX_CONTEXT // block_size))
        for target in (tokens, tables):
            kernel.scatter(target, ints(300), ints(300), ints(300))
        for rows, count in ((1, 1), (64, 64), (3, 2048)):
            kernel.spread(
                ints(rows), ints(rows), ints(rows + 1), tokens, tables, block_size, count,
                ints(count), ints(count), _longs(count), ints(rows), ints(*tables.shape)[:rows],
            )  # fmt: skip


def _sampling(recorder: Recorder) -> None:
    kernel: Any = registry.load("sample", "triton")
    for vocabulary in VOCABULARIES:
        recorder.case = f"sampling from {vocabulary} tokens"
        columns = _Columns(ints(MAX_ROWS, WORDS))
        logits = torch.empty(64, vocabulary, device=META)
        chosen, finite = _longs(64), torch.empty(64, dtype=torch.bool, device=META)
        for usable in (None, finite):
            where = (ints(64), ints(64), columns, ints(MAX_ROWS, MAX_CONTEXT))
            kernel.sample_rows(logits, *where, chosen, finite, usable=usable)
        for rows in (ints(64), _longs(64)):
            kernel.penalise_rows(
                logits, rows, rows, columns.packed, ints(MAX_ROWS, MAX_CONTEXT), ints(32, vocabulary)
            )


def _choices(recorder: Recorder) -> None:
    """What only some requests ask for: logprobs, ranks, distributions of their own."""
    kernel: Any = registry.load("sample", "triton")
    for vocabulary in (128256, 50257):
        recorder.case = f"logprobs of {vocabulary} tokens"
        logits = torch.empty(5, vocabulary, device=META)
        kernel.argmax(logits)
        kernel.peaks(logits)
        kernel.log_softmax_gather(logits, _longs(5))
        kernel.token_ranks(logits, _longs(5))
        floats = torch.empty(5, device=META)
        kernel.sample_filtered(logits, floats, ints(5), floats, floats, floats.double())


def _pages(recorder: Recorder) -> None:
    kernel: Any = registry.load("pages", "triton")
    for layout in LAYOUTS:
        recorder.case = f"copies of blocks of {layout.block_bytes} bytes"
        pool = Pool(layout, NUM_BLOCKS, META)
        for count in (1, 2, 5, 64, 256):
            kernel.copy_blocks(pool.data, _longs(count), _longs(count))


def _adapters(recorder: Recorder) -> None:
    kernel: Any = registry.load("lora_pack", "triton")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        recorder.case = f"adapters' matrices as {str(dtype)[6:]}"
        weights = torch.empty(1 << 20, dtype=dtype, device=META)
        for given in SOURCES:
            tiles = torch.empty(7, 6, dtype=torch.int64, device=META)
            kernel.place(torch.empty(1 << 16, dtype=given, device=META), tiles, 4096, weights)


def _trees(recorder: Recorder) -> None:
    kernel: Any = registry.load("trees", "triton")
    for layout in LAYOUTS:
        recorder.case = f"accepted drafts in blocks of {layout.block_bytes} bytes"
        pool = Pool(layout, NUM_BLOCKS, META)
        tables = ints(MAX_ROWS, MAX_CONTEXT // layout.block_size)
        for most in (4, TOKENS_OF_TREES, MAX_NODES - 1):
            kernel.settle(
                _longs(3 * most), ints(3, 4), ints(3, 2, most), ints(MAX_ROWS, MAX_CONTEXT), tables,
                pool.slots(),
            )  # fmt: skip


def _away(recorder: Recorder) -> None:
    recorder.case = "experts in host memory"
    kernel: Any = registry.load("moe", "triton")
    # of Qwen3-30B-A3B
    stacks = [(_halves(count, 1536, 2048), _halves(count, 2048, 768)) for count in (96, 32)]
    for tokens in (1, 64, 512, 4096):
        x, weights = _halves(tokens, 2048), torch.empty(tokens, 8, device=META)
        routing = Routing(ints(tokens, 8), weights, None)
        kernel.experts(x, *stacks[0], routing, x, away=AwayExperts(*stacks[1], ints(128)))


def _ranks(recorder: Recorder) -> None:
    recorder.case = "deterministic GEMMs of ranks"
    kernel: Any = registry.load("invariant_linear", "triton")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, rows, columns in ((64, 4096, 7168), (1, 576, 384), (200, 576, 192)):
            x, weight = (torch.empty(n, columns, dtype=dtype, device=META) for n in (tokens, rows))
            kernel.linear(x, weight, sums=torch.empty(tokens, rows, device=META))


def _measured_attention(recorder: Recorder) -> None:
    """Sums of pieces by a launch of their own: an alternative that benchmarks time."""
    kernel: Any = registry.load("attention", "triton")
    rows, heads, kv_heads, head_dim, tokens = 8, 32, 8, 128, 4096
    recorder.case = "attention as benchmarks have it"
    tuning = AttentionTuning(fused_reduction=False)
    planner = kernel.AttentionPlanner(
        rows, heads, kv_heads, head_dim, META, max_tokens=tokens, max_context=tokens, tuning=tuning
    )
    pool = Pool(BlockLayout(1, 16, kv_heads, head_dim, "bfloat16"), NUM_BLOCKS, META)
    q = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device=META)
    starts, lens, tables = ints(rows + 1), ints(rows), ints(rows, tokens // 16)
    plan = planner.plan(starts, lens, rows)
    kernel.paged_attention(q, *pool.layer(0), starts, lens, tables, 0.1, plan=plan)


def _training(recorder: Recorder) -> None:
    """Attention of packed sequences, forward and backward, dense and block-sparse; the gradient of gated SiLU."""
    kernel: Any = registry.load("packed_attention", "triton")
    for heads, kv_heads, head_dim, tokens in (
        (32, 8, 128, 4096),
        (32, 32, 96, 4096),
        (32, 32, 80, 2048),
        (9, 3, 64, 2048),
    ):
        recorder.case = f"training attention of {heads} heads of {head_dim}"
        q = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device=META)
        k = torch.empty(tokens, kv_heads, head_dim, dtype=torch.bfloat16, device=META)
        blocks = tokens // BLOCK
        for mask in (None, torch.empty(blocks, blocks, dtype=torch.uint8, device=META)):
            given = (ints(4), tokens, 0.1, mask)
            out, sums = kernel.forward(q, k, k, *given)
            kernel.backward(out, q, k, k, out, sums, *given)
    registry.load("activation", "triton").silu_mul_backward(_halves(64, 14336), _halves(64, 28672))


def _longs(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=META)


def _halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)
