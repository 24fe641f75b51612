"""Graphs: forward passes as CUDA graphs, decodes by their number of rows, small prompts and drafts by their tokens."""

import time
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.models.model import DecoderModel
from quire.observe.logs import get_logger
from quire.runner.adapters import AdapterSlots
from quire.runner.device_inputs import SMALL_ROWS, VERIFY_SIZES, DeviceInputs, VerifyInputs

# Tokens of a step with prompts. Larger ones keep the device busier than the host is with launching.
PROMPT_SIZES = (16, 32, 64, 128, 256, 512)
ADAPTED_SECONDS = 3.5  # of capturing passes with adapters at start, beside those without

logger = get_logger(__name__)


class Kind(Enum):
    """What a graph holds, and so what its size counts."""

    DECODE = "rows that advance by one token"
    PROMPTS = "tokens of few rows with prompts"
    CHAINS = "tokens of rows that verify chains"
    TREES = "tokens of rows that verify trees"


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # what the graph writes: one row per row of a decode, or per possible sample


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that are captured: dense where a row costs most, at most an eighth of padding above 64."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 4096, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def adapted_sizes(max_rows: int) -> list[int]:
    """The same for steps with adapters: fewer, since both families are captured at start."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 32), *range(256, 512, 64), *range(512, 4096, 128)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def token_counts(max_rows: int, max_tokens: int, drafts: bool) -> list[int]:
    """How many tokens graphs will hold, as far as is known before the pool is: the sizes to tune GEMMs for."""
    others = (*(PROMPT_SIZES if max_rows >= SMALL_ROWS else ()), *(VERIFY_SIZES if drafts else ()))
    return sorted({*decode_sizes(max_rows), *(size for size in others if size <= max_tokens)})


class Graphs:
    """A graph holds every kernel between the step's integers and the hidden states; sampling stays outside.

    All graphs share one memory pool, since one runs at a time. Sizes that were not captured at start are when
    they are first needed. A size for whose graph there is no memory runs without one.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: Pool,
        inputs: DeviceInputs,
        drafts: VerifyInputs,
        max_rows: int,
        max_tokens: int,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._adapters = adapters
        self._adapted_sizes = adapted_sizes(max_rows)
        self._model = model
        self._pool = pool
        self._inputs = inputs
        self._drafts = drafts
        self._decode_sizes = decode_sizes(max_rows)
        self._prompt_sizes = [size for size in PROMPT_SIZES if size <= max_tokens]
        if max_rows < SMALL_ROWS:
            self._prompt_sizes = []
        self._captured: dict[tuple[Kind, int, int], _Captured] = {}  # (what, size, adapters' kinds)
        self._too_large: set[tuple[Kind, int, int]] = set()  # there was no memory to capture these
        self._memory = torch.cuda.graph_pool_handle()

    def padded_rows(self, num_rows: int, adapted: bool = False) -> int:
        """The size that serves a decode of `num_rows`."""
        sizes = self._adapted_sizes if adapted else self._decode_sizes
        return sizes[bisect_left(sizes, num_rows)]

    def padded_tokens(self, num_tokens: int) -> int | None:
        """The size that serves `num_tokens` of few rows; None if they are too many."""
        index = bisect_left(self._prompt_sizes, num_tokens)
        return self._prompt_sizes[index] if index < len(self._prompt_sizes) else None

    def decode(self, num_rows: int, adapted: bool = False) -> Tensor:
        """Hidden states [num_rows, width], valid until the next run. `adapted`: rows may have adapters."""
        return self._run(Kind.DECODE, num_rows, adapted)

    def prompts(self, num_tokens: int, adapted: bool = False) -> Tensor:
        """Hidden states [SMALL_ROWS, width] of the tokens to be sampled, valid until the next run."""
        return self._run(Kind.PROMPTS, num_tokens, adapted)

    def drafts(self, num_tokens: int, has_trees: bool) -> Tensor:
        """Hidden states [num_tokens, width] of a step that verifies drafts, valid until the next run."""
        return self._run(Kind.TREES if has_trees else Kind.CHAINS, num_tokens)

    def capture(self, seconds: float) -> int:
        """Captures sizes for about `seconds`; returns how many. The largest comes first: the others fit its memory.

        Then from the smallest up: small batches are what a server sees most, and where launching costs most.
        """
        began = time.perf_counter()
        decodes = [(Kind.DECODE, size) for size in (self._decode_sizes[-1], *self._decode_sizes[:-1])]
        prompts = [(Kind.PROMPTS, size) for size in self._prompt_sizes]
        for kind, size in decodes[:1] + prompts + decodes[1:]:
            if time.perf_counter() - began > seconds:
                break
            self._capture(kind, size)
        if self._adapters is not None and self._adapters.kinds:
            began = time.perf_counter()
            for size in (self._adapted_sizes[-1], *self._adapted_sizes[:-1]):
                if time.perf_counter() - began < ADAPTED_SECONDS:
                    self._capture(Kind.DECODE, size, True)
        return len(self._captured)

    def _run(self, kind: Kind, size: int, adapted: bool = False) -> Tensor:
        key = (kind, size, self._kinds(adapted))
        captured = self._captured.get(key)
        if captured is None:
            if key in self._too_large:
                return self._model(self._batch(kind, size, adapted), self._pool)
            # No warm-up may have run these, and nothing may compile inside a graph.
            if adapted or kind in (Kind.CHAINS, Kind.TREES):
                self._model(self._batch(kind, size, adapted), self._pool)
            try:
                captured = self._capture(kind, size, adapted)
            except torch.OutOfMemoryError:
                logger.warning(
                    "no memory for a graph of %d (%s): such steps run without one", size, kind.value
                )
                self._too_large.add(key)
                return self._model(self._batch(kind, size, adapted), self._pool)
        captured.graph.replay()
        return captured.hidden

    def _kinds(self, adapted: bool) -> int:
        """Of layers that call the adapters' kernel in a pass of this sort."""
        return self._adapters.kinds if adapted and self._adapters is not None else 0

    def _capture(self, kind: Kind, size: int, adapted: bool = False) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # Another thread may wait for a copy meanwhile, which must not fail this capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            hidden = self._model(self._batch(kind, size, adapted), self._pool)
        kinds = self._kinds(adapted)
        if kinds:  # a new kind of adapter came: passes without it are of no use any more
            outdated = [key for key in self._captured if key[2] not in (0, kinds)]
            for key in outdated:
                del self._captured[key]
        self._captured[kind, size, kinds] = _Captured(graph, hidden)
        return self._captured[kind, size, kinds]

    def _batch(self, kind: Kind, size: int, adapted: bool = False) -> Batch:
        """Made from what the step's inputs hold now; a captured graph makes it again at each replay."""
        adapters = self._adapters if adapted else None
        lora = adapters.recorded_tokens(size) if adapters is not None else None
        if kind is Kind.DECODE:
            return self._inputs.decode(size, lora)
        if kind is Kind.PROMPTS:
            wanted = adapters.recorded_wanted(SMALL_ROWS) if adapters is not None else None
            return self._inputs.small(size, lora, wanted)
        return self._drafts.batch(size, kind is Kind.TREES)
