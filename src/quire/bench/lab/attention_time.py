"""How long attention itself takes in a decode step, for pages of any size."""

import random
import time
from dataclasses import dataclass

import torch

from quire.core.config import ModelConfig
from quire.engine.build import block_layout
from quire.engine.resolve import Numbers
from quire.kernels import choose
from quire.layers.pool import Pool


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sequences that each look back over `context` tokens."""

    num_sequences: int
    context: int


def attention_seconds(
    model: ModelConfig, numbers: Numbers, block_size: int, shape: DecodeShape, seconds: float, seed: int
) -> float:
    """All layers of one decode step, the least of many; a sequence's blocks lie anywhere in the pool."""
    device = numbers.device
    blocks_each = -(-shape.context // block_size)
    total = shape.num_sequences * blocks_each
    pool = Pool(block_layout(block_size, model, numbers), total + 1, device)
    for layer in range(model.num_layers):
        for pages in pool.layer(layer):
            pages.copy_(torch.randn(pages.shape, device=device).to(pages.dtype))
    order = list(range(1, total + 1))
    random.Random(seed).shuffle(order)
    tables = torch.tensor(order, dtype=torch.int32, device=device).view(shape.num_sequences, blocks_each)
    starts = torch.arange(shape.num_sequences + 1, dtype=torch.int32, device=device)
    lengths = torch.full((shape.num_sequences,), shape.context, dtype=torch.int32, device=device)
    queries = torch.randn(shape.num_sequences, model.num_heads, model.head_dim, device=device)
    queries = queries.to(numbers.format.activation_dtype)
    attend = choose("attention", device).paged_attention

    def step() -> None:
        for layer in range(model.num_layers):
            k_pages, v_pages = pool.layer(layer)
            attend(queries, k_pages, v_pages, starts, lengths, tables, model.head_dim**-0.5, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    best, ends = float("inf"), time.perf_counter() + seconds
    while (started := time.perf_counter()) < ends or best == float("inf"):
        step()
        best = min(best, time.perf_counter() - started)
    return best
