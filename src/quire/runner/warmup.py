"""Before requests come: kernels compile, a step of each kind runs, and the largest step's memory is measured."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace

import torch

from quire.core.config import ModelConfig
from quire.core.layout import BlockLayout
from quire.core.request import ints
from quire.core.sampling import SamplingParams
from quire.core.step import RowStart, Step
from quire.kernels import choose
from quire.kernels.lora.records import MAX_PARTS, LoraSegments, LoraTables
from quire.kernels.sample.columns import WORDS
from quire.kernels.sm_share import use_stream
from quire.layers.attention import Pool
from quire.layers.batch import Batch, GroupTables
from quire.layers.lora import segment_length
from quire.models.model import DecoderModel
from quire.observe.logs import get_logger
from quire.runner.cuda import attention_planner
from quire.runner.device_inputs import PROMPT_SIZES
from quire.runner.device_ops import RunnerLimits

PROMPT_TOKENS = 20  # where the limits allow
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
PENALISED = SAMPLED.changed(presence_penalty=0.5)  # its logits are edited first

logger = get_logger(__name__)


class KernelWarmup:
    """Compiles kernels in threads while weights load; begins when it is made.

    Compilers release Python's lock most of the time. Each piece runs kernels as a step would, on empty rows. What it
    fails to foresee is compiled later, as it would be without it.
    """

    def __init__(self, device: torch.device, *pieces: Callable[[], None]) -> None:
        # No daemons: Python waits for them, should the start fail and the process end.
        self._threads = [Thread(target=_run, args=(device, piece)) for piece in pieces]
        for thread in self._threads:
            thread.start()

    @property
    def goes_on(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def _run(device: torch.device, piece: Callable[[], None]) -> None:
    try:
        with torch.cuda.device(device), torch.inference_mode():
            use_stream()
            piece()
    except Exception as fault:  # the start itself reports what is wrong, if something is
        logger.debug("a kernel warm-up ended early: %s", fault)


def warm_up_sampling(vocab_size: int, device: torch.device) -> None:
    """Samples a token for one row."""
    sample_rows = getattr(choose("sample", device), "sample_rows", None)
    if sample_rows is None:
        return
    integers = torch.zeros(2, 16, dtype=torch.int32, device=device)
    row, position = integers.unbind(0)
    columns = SimpleNamespace(packed=torch.zeros(1, WORDS, dtype=torch.int32, device=device))
    chosen = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.zeros(1, vocab_size, device=device)
    sample_rows(logits, row[:1], position[:1], columns, torch.zeros_like(integers), chosen, chosen.bool())


def warm_up_attention(
    config: ModelConfig, limits: RunnerLimits, layout: BlockLayout, device: torch.device
) -> None:
    """Attends as a decode of each range of rows does, and as a prompt does, with no context."""
    planner = None if limits.deterministic else attention_planner(config, limits, layout, device)
    if planner is None:
        return
    kernel, pool = choose("attention", device), Pool(layout, 1, device)
    (k_pages, v_pages), (k_scales, v_scales) = pool.layer(0), pool.scales(0)
    max_blocks = -(-limits.max_model_len // layout.block_size)
    for num_rows in planner.range_sizes:
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        shape = (num_rows, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries = torch.zeros(shape, dtype=limits.activation_dtype, device=device)[:, : config.num_heads]
        out = queries.new_empty(num_rows, config.num_heads * config.head_dim)
        plan = planner.plan(starts, lens, num_rows, num_tokens=num_rows, block_tables=tables)
        kernel.paged_attention(
            queries, k_pages, v_pages, starts, lens, tables, 1.0, 0, out,
            plan=plan, max_query_len=2, k_scales=k_scales, v_scales=v_scales,
        )  # fmt: skip


def warm_up_lora(
    num_inputs: int,
    bounds: tuple[int, ...],  # of the projections that are fused, as in LoraGroup
    num_tokens: int,
    dtype: torch.dtype,  # of adapters
    activation_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Adds adapters to a projection as a step does, for rows that have none."""
    tables = LoraTables.empty(torch.zeros(16, dtype=dtype, device=device), 1, MAX_PARTS)
    integers = torch.full((3, 16), -1, dtype=torch.int32, device=device)
    segments = LoraSegments(integers[0], integers[1, :1], integers[2, :2], segment_length(num_tokens))
    x = torch.zeros(1, num_inputs, dtype=activation_dtype, device=device).expand(num_tokens, -1)
    y = torch.zeros(1, bounds[-1], dtype=activation_dtype, device=device).expand(num_tokens, -1)
    choose("lora", device).add(x, y, tables, segments, 0, bounds)


def warmup_steps(limits: RunnerLimits, layout: BlockLayout, prompt: int = PROMPT_TOKENS) -> Iterator[Step]:
    """A prefill, a prefill beside decodes, then decodes: small steps that make every kernel of a runner compile.

    Every block is block 0, so nothing of value is written.
    """
    max_tokens = limits.max_num_batched_tokens
    rows = range(min(2, limits.max_num_seqs, max_tokens))
    prompt = max(1, min(prompt, max_tokens // len(rows), limits.max_model_len // 2))
    num_blocks = -(-(prompt + 1) // layout.block_size) * layout.num_groups
    yield _step(0, rows, [0] * len(rows), [prompt] * len(rows), num_blocks)
    if len(rows) > 1:
        yield _step(1, rows, [0, prompt], [prompt, 1], num_blocks, PENALISED)
    yield _step(2, rows, [prompt] * len(rows), [1] * len(rows), num_blocks)


def _step(
    step_id: int,
    rows: range,
    computed: list[int],
    counts: list[int],
    num_blocks: int,
    second: SamplingParams = SAMPLED,  # of the second row
) -> Step:
    samplings = (SamplingParams(temperature=0.0), second)
    blocks = ints([0] * num_blocks)
    tokens = ints([0] * (max(a + b for a, b in zip(computed, counts, strict=True))))
    starts = tuple(
        RowStart(row, tokens, blocks, samplings[row], seed=0, sample_index=0, num_prompt_tokens=1)
        for row in rows
    )
    return Step(
        step_id=step_id,
        starts=starts,
        rows=ints(rows),
        num_computed=ints(computed),
        num_tokens=ints(counts),
        sample_sources=ints(range(len(rows))),
        sample_rows=ints(rows),
    )


@torch.inference_mode()
def activation_bytes(
    model: DecoderModel,
    layout: BlockLayout,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """What the largest step needs beside weights and pool, measured on the device.

    Peak of the largest prefill, the logits of every row, and what graphs keep for themselves.
    """
    pool = Pool(layout, 2, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model(
        _empty_prefill(max_num_batched_tokens, min(max_num_batched_tokens, max_model_len), layout, device),
        pool,
    )
    largest = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    num_tokens = max(max_num_seqs, min(PROMPT_SIZES[-1], max_num_batched_tokens))
    captured = replace(_empty_prefill(num_tokens, 1, layout, device), logits_indices=None)
    hidden = model(captured, pool)
    graph = torch.cuda.max_memory_allocated(device) - before
    model.logits(hidden[:max_num_seqs])
    logits = max_num_seqs * model.config.vocab_size * 4
    torch.cuda.synchronize(device)
    return max(largest, 3 * logits) + 2 * graph  # graphs keep theirs; sampling may copy the logits twice


def _empty_prefill(num_tokens: int, longest: int, layout: BlockLayout, device: torch.device) -> Batch:
    """Prompts with no content, whose every slot is in block 0."""
    ends = [*range(longest, num_tokens, longest), num_tokens]
    starts = [0, *ends[:-1]]
    lengths = torch.tensor([e - s for s, e in zip(starts, ends, strict=True)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths.tolist()])
    slots = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    tables = torch.zeros(len(ends), -(-longest // layout.block_size), dtype=torch.int32, device=device)
    return Batch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=positions.to(device),
        slots=slots,
        query_starts=torch.tensor([0, *ends], dtype=torch.int32, device=device),
        context_lens=lengths.to(device),
        block_tables=tables,
        logits_indices=torch.tensor([e - 1 for e in ends], dtype=torch.int32, device=device),
        max_query_len=longest,
        more_groups=(GroupTables(slots, tables),) * (layout.num_groups - 1),
    )
