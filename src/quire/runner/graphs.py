"""DecodeGraphs: the forward pass of a decode as CUDA graphs, one per padded number of rows."""

import time
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.pool import Pool
from quire.models.model import Model
from quire.runner.device_inputs import DeviceInputs


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # [R, width], what the graph writes


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that are captured: dense where a row costs most, at most an eighth of padding above 64."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 4096, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class DecodeGraphs:
    """A graph holds every kernel between the packed integers and the hidden states; sampling stays outside.

    All graphs share one memory pool, since one runs at a time. Sizes that were not captured at start are when
    they are first needed.
    """

    def __init__(self, model: Model, pool: Pool, inputs: DeviceInputs, max_rows: int) -> None:
        self._model = model
        self._pool = pool
        self._inputs = inputs
        self._sizes = graph_sizes(max_rows)
        self._captured: dict[int, _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def padded(self, num_rows: int) -> int:
        """The size that serves so many rows."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def capture(self, seconds: float) -> int:
        """Captures sizes for so long; how many there are. The largest comes first: the others fit into its memory.

        Then from the smallest up: small batches are what a server sees most, and where launching costs most.
        """
        began = time.perf_counter()
        for size in (self._sizes[-1], *self._sizes[:-1]):
            if time.perf_counter() - began > seconds:
                break
            self._capture(size)
        return len(self._captured)

    def run(self, size: int) -> Tensor:
        """Hidden states [size, width], valid until the next run."""
        found = self._captured.get(size) or self._capture(size)
        found.graph.replay()
        return found.hidden

    def _capture(self, size: int) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden = self._model(self._inputs.decode(size), self._pool)
        self._captured[size] = _Captured(graph, hidden)
        return self._captured[size]
