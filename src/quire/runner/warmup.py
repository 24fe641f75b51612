"""Rehearsal: kernels that take long to compile are compiled in threads, while weights load and others compile.

Compilers leave Python's lock to others most of the time. A rehearsal runs the kernels as a step would, on rows that
hold nothing. What it fails to foresee is compiled later, as it would be without one.
"""

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace

import torch

from quire.core.config import ModelConfig
from quire.core.layout import BlockLayout
from quire.kernels import choose
from quire.kernels.sample.columns import WORDS
from quire.layers.pool import Pool
from quire.observe.logs import get_logger
from quire.runner.device_runner import attention_planner
from quire.runner.runner import RunnerLimits

logger = get_logger(__name__)


class KernelWarmup:
    """Begins when it is made."""

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
            piece()
    except Exception as fault:  # the start itself says what is wrong, if something is
        logger.debug("a rehearsal ended early: %s", fault)


def warm_up_sampling(vocab_size: int, device: torch.device) -> None:
    """Draws a token for one row."""
    draw = getattr(choose("sample", device), "sample_rows", None)
    if draw is None:
        return
    integers = torch.zeros(2, 16, dtype=torch.int32, device=device)
    row, position = integers.unbind(0)
    columns = SimpleNamespace(packed=torch.zeros(1, WORDS, dtype=torch.int32, device=device))
    chosen = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.zeros(1, vocab_size, device=device)
    draw(logits, row[:1], position[:1], columns, torch.zeros_like(integers), chosen, chosen.bool())


def warm_up_attention(
    config: ModelConfig, limits: RunnerLimits, layout: BlockLayout, device: torch.device
) -> None:
    """Attends as a decode of each range of rows does, and as a prompt does, with no context."""
    planner = None if limits.deterministic else attention_planner(config, limits, layout, device)
    if planner is None:
        return
    kernel, (k_pages, v_pages) = choose("attention", device), Pool(layout, 1, device).layer(0)
    max_blocks = -(-limits.max_model_len // layout.block_size)
    for num_rows in planner.range_sizes:
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        shape = (num_rows, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries = torch.zeros(shape, dtype=limits.activation_dtype, device=device)[:, : config.num_heads]
        out = queries.new_empty(num_rows, config.num_heads * config.head_dim)
        plan = planner.plan(starts, lens, num_rows, num_tokens=num_rows, block_tables=tables)
        where = (k_pages, v_pages, starts, lens, tables)
        kernel.paged_attention(queries, *where, 1.0, 0, out, plan=plan, max_query_len=2)
