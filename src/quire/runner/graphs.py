"""Graphs: forward passes as CUDA graphs, decodes by their number of rows and small prompts by their tokens."""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.batch import Batch
from quire.layers.pool import Pool
from quire.models.model import Model
from quire.runner.device_inputs import SMALL_ROWS, DeviceInputs

# Tokens of a step with prompts. Larger ones keep the device busier than the host is with launching.
PROMPT_SIZES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # what the graph writes: one line per row of a decode, or per possible sample


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that are captured: dense where a row costs most, at most an eighth of padding above 64."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 4096, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class Graphs:
    """A graph holds every kernel between the step's integers and the hidden states; sampling stays outside.

    All graphs share one memory pool, since one runs at a time. Sizes that were not captured at start are when
    they are first needed.
    """

    def __init__(
        self, model: Model, pool: Pool, inputs: DeviceInputs, max_rows: int, max_tokens: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._inputs = inputs
        self._decode_sizes = decode_sizes(max_rows)
        self._prompt_sizes = [size for size in PROMPT_SIZES if size <= max_tokens]
        if max_rows < SMALL_ROWS:
            self._prompt_sizes = []
        self._captured: dict[tuple[bool, int], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def padded_rows(self, num_rows: int) -> int:
        """The size that serves a decode of so many rows."""
        return self._decode_sizes[bisect_left(self._decode_sizes, num_rows)]

    def padded_tokens(self, num_tokens: int) -> int | None:
        """The size that serves so many tokens of few rows; None if that is too many."""
        index = bisect_left(self._prompt_sizes, num_tokens)
        return self._prompt_sizes[index] if index < len(self._prompt_sizes) else None

    def decode(self, num_rows: int) -> Tensor:
        """Hidden states [num_rows, width], valid until the next run."""
        return self._run(True, num_rows)

    def prompts(self, num_tokens: int) -> Tensor:
        """Hidden states [SMALL_ROWS, width] of the tokens to be sampled, valid until the next run."""
        return self._run(False, num_tokens)

    def capture(self, seconds: float) -> int:
        """Captures sizes for so long; how many there are. The largest comes first: the others fit into its memory.

        Then from the smallest up: small batches are what a server sees most, and where launching costs most.
        """
        began = time.perf_counter()
        decodes = [(True, size) for size in (self._decode_sizes[-1], *self._decode_sizes[:-1])]
        prompts = [(False, size) for size in self._prompt_sizes]
        for is_decode, size in decodes[:1] + prompts + decodes[1:]:
            if time.perf_counter() - began > seconds:
                break
            self._capture(is_decode, size)
        return len(self._captured)

    def _run(self, is_decode: bool, size: int) -> Tensor:
        found = self._captured.get((is_decode, size)) or self._capture(is_decode, size)
        found.graph.replay()
        return found.hidden

    def _capture(self, is_decode: bool, size: int) -> _Captured:
        make: Callable[[int], Batch] = self._inputs.decode if is_decode else self._inputs.small
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden = self._model(make(size), self._pool)
        self._captured[is_decode, size] = _Captured(graph, hidden)
        return self._captured[is_decode, size]
