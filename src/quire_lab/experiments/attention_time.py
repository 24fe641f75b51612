"""How long attention itself takes in a decode step, for pages of any size."""

import random
import time
from dataclasses import dataclass

import torch

from quire.core.config import ModelConfig
from quire.engine.build import block_layout
from quire.engine.build.resolve import Precision
from quire.kernels import choose
from quire.layers.pool import Pool


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sequences that each look back over `context` tokens."""

    num_sequences: int
    context: int


class AttentionStep:
    """Attention in all layers of one decode step; a sequence's blocks lie anywhere in the pool."""

    def __init__(
        self, model: ModelConfig, numbers: Precision, block_size: int, shape: DecodeShape, seed: int
    ) -> None:
        device = numbers.device
        blocks_each = -(-shape.context // block_size)
        total = shape.num_sequences * blocks_each
        self._model, self._device = model, device
        self._pool = Pool(block_layout(block_size, model, numbers), total + 1, device)
        for layer in range(model.num_layers):
            for pages in self._pool.layer(layer):
                pages.copy_(torch.randn(pages.shape, device=device).to(pages.dtype))
        order = list(range(1, total + 1))
        random.Random(seed).shuffle(order)
        self._tables = torch.tensor(order, dtype=torch.int32, device=device).view(
            shape.num_sequences, blocks_each
        )
        self._starts = torch.arange(shape.num_sequences + 1, dtype=torch.int32, device=device)
        self._lengths = torch.full((shape.num_sequences,), shape.context, dtype=torch.int32, device=device)
        queries = torch.randn(shape.num_sequences, model.num_heads, model.head_dim, device=device)
        self._queries = queries.to(numbers.format.activation_dtype)
        self._attend = choose("attention", device).paged_attention
        self()  # memory is touched once

    def __call__(self) -> None:
        scale = self._model.head_dim**-0.5
        for layer in range(self._model.num_layers):
            pages = self._pool.layer(layer)
            self._attend(self._queries, *pages, self._starts, self._lengths, self._tables, scale, 0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def least_seconds(self, seconds: float) -> float:
        """Of the calls that this many seconds have room for, one at least."""
        best, ends = float("inf"), time.perf_counter() + seconds
        while (started := time.perf_counter()) < ends or best == float("inf"):
            self()
            best = min(best, time.perf_counter() - started)
        return best
