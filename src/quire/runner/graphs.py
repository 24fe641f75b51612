"""Graphs: forward passes as CUDA graphs: decodes by rows, steps with prompts by tokens and rows, drafts by tokens."""

import time
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from quire.kernels.sm_share import capture_stream
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.models.model import DecoderModel
from quire.observe.logs import get_logger
from quire.runner.adapters import AdapterSlots
from quire.runner.device_inputs import PROMPT_SIZES, VERIFY_SIZES, DeviceInputs, VerifyInputs

PROMPT_ROWS = (16, 64, 256)  # and the largest number of rows; one of them is a row of padding
# With fewer rows than 256 there is less traffic: fewer sizes, since each takes time at start.
FEW_ROWS_SIZES = (16, 32, 64, *range(128, 512, 64), *range(512, 1025, 128))
ADAPTED_SECONDS = 3.5  # of capturing passes with adapters at start, beside those without

logger = get_logger(__name__)


class Kind(Enum):
    """What a graph holds, and so what its size counts."""

    DECODE = "rows that advance by one token"
    PROMPTS = "tokens of rows with prompts among them"
    CHAINS = "tokens of rows that verify chains"
    TREES = "tokens of rows that verify trees"


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for."""

    kind: Kind
    size: int  # rows of a decode, else tokens
    rows: int = 0  # of a step with prompts, the row of padding included


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
    prompts = {shape.size for shape in prompt_shapes(max_rows, max_tokens)}
    verified = {size for size in VERIFY_SIZES if drafts and size <= max_tokens}
    return sorted({*decode_sizes(max_rows), *prompts, *verified})


def prompt_shapes(max_rows: int, max_tokens: int) -> list[StepShape]:
    """Steps with prompts that are captured, small ones first. Each has more tokens than rows."""
    shapes = []
    fewer = 0  # rows that the shapes before have
    for rows in (*(rows for rows in PROMPT_ROWS if rows <= max_rows), max_rows + 1):
        sizes = PROMPT_SIZES if rows >= PROMPT_ROWS[-1] else FEW_ROWS_SIZES
        shapes += [StepShape(Kind.PROMPTS, size, rows) for size in sizes if fewer < size <= max_tokens]
        fewer = rows
    return shapes


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
        self._prompt_shapes = prompt_shapes(max_rows, max_tokens)
        self._captured: dict[tuple[StepShape, int], _Captured] = {}  # (shape, adapters' kinds)
        self._too_large: set[tuple[StepShape, int]] = set()  # there was no memory to capture these
        self._memory = torch.cuda.graph_pool_handle()

    def padded_rows(self, num_rows: int, adapted: bool = False) -> int:
        """The size that serves a decode of `num_rows`."""
        sizes = self._adapted_sizes if adapted else self._decode_sizes
        return sizes[bisect_left(sizes, num_rows)]

    def prompt_shape(self, num_tokens: int, num_rows: int) -> StepShape | None:
        """The least shape that serves a step with prompts, with a row to spare; None if it is too large."""
        for shape in self._prompt_shapes:
            if num_tokens <= shape.size and num_rows < shape.rows:
                return shape
        return None

    def decode(self, num_rows: int, adapted: bool = False) -> Tensor:
        """Hidden states [num_rows, width], valid until the next run. `adapted`: rows may have adapters."""
        return self._run(StepShape(Kind.DECODE, num_rows), adapted)

    def prompts(self, shape: StepShape, adapted: bool = False) -> Tensor:
        """Hidden states [shape.rows, width] of the tokens to be sampled, valid until the next run."""
        return self._run(shape, adapted)

    def drafts(self, num_tokens: int, has_trees: bool) -> Tensor:
        """Hidden states [num_tokens, width] of a step that verifies drafts, valid until the next run."""
        return self._run(StepShape(Kind.TREES if has_trees else Kind.CHAINS, num_tokens))

    def capture(self, seconds: float) -> int:
        """Captures sizes for about `seconds`; returns how many. The largest comes first: the others fit its memory.

        Then from the smallest up: small batches are what a server sees most, and where launching costs most.
        """
        self._capture_all(self._decode_sizes, seconds, adapted=False)
        if self._adapters is not None and self._adapters.kinds:
            self._capture_all(self._adapted_sizes, ADAPTED_SECONDS, adapted=True)
        return len(self._captured)

    def _capture_all(self, sizes: list[int], seconds: float, adapted: bool) -> None:
        began = time.perf_counter()
        decodes = [StepShape(Kind.DECODE, size) for size in (sizes[-1], *sizes[:-1])]
        for shape in decodes[:1] + self._prompt_shapes[-1:] + decodes[1:] + self._prompt_shapes[:-1]:
            if time.perf_counter() - began > seconds:
                break
            self._capture(shape, adapted)

    def _run(self, shape: StepShape, adapted: bool = False) -> Tensor:
        key = (shape, self._kinds(adapted))
        captured = self._captured.get(key)
        if captured is None:
            if key in self._too_large:
                return self._model(self._batch(shape, adapted), self._pool)
            # No warm-up may have run these, and nothing may compile inside a graph.
            if adapted or shape.kind in (Kind.CHAINS, Kind.TREES):
                self._model(self._batch(shape, adapted), self._pool)
            try:
                captured = self._capture(shape, adapted)
            except torch.OutOfMemoryError:
                logger.warning("no memory for a graph of %s: such steps run without one", shape)
                self._too_large.add(key)
                return self._model(self._batch(shape, adapted), self._pool)
        captured.graph.replay()
        return captured.hidden

    def _kinds(self, adapted: bool) -> int:
        """Of layers that call the adapters' kernel in a pass of this sort."""
        return self._adapters.kinds if adapted and self._adapters is not None else 0

    def _capture(self, shape: StepShape, adapted: bool = False) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # Another thread may wait for a copy meanwhile, which must not fail this capture.
        with torch.cuda.graph(graph, self._memory, capture_stream(), capture_error_mode="thread_local"):
            hidden = self._model(self._batch(shape, adapted), self._pool)
        kinds = self._kinds(adapted)
        if kinds:  # a new kind of adapter came: passes without it are of no use any more
            outdated = [key for key in self._captured if key[1] not in (0, kinds)]
            for key in outdated:
                del self._captured[key]
        self._captured[shape, kinds] = _Captured(graph, hidden)
        return self._captured[shape, kinds]

    def _batch(self, shape: StepShape, adapted: bool = False) -> Batch:
        """Made from what the step's inputs hold now; a captured graph makes it again at each replay."""
        adapters = self._adapters if adapted else None
        lora = adapters.recorded_tokens(shape.size) if adapters is not None else None
        if shape.kind is Kind.DECODE:
            return self._inputs.decode(shape.size, lora)
        if shape.kind is Kind.PROMPTS:
            wanted = adapters.recorded_wanted(shape.rows) if adapters is not None else None
            return self._inputs.prompts(shape.size, shape.rows, lora, wanted)
        return self._drafts.batch(shape.size, shape.kind is Kind.TREES)
