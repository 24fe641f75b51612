"""CpuOps: steps on a worker thread, rows in host memory, short passes replayed from tapes."""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.core.step import PromptLogprobs, RowStart, Step
from quire.kernels.native import Arena, Tape
from quire.kernels.registry import keep_threads
from quire.layers.attention import Pool
from quire.layers.batch import Batch, GroupTables, TreeMasks
from quire.models.model import DecoderModel
from quire.observe.heap import release_freed
from quire.runner.adapters import AdapterSlots
from quire.runner.device_ops import ForwardPass, HostSamples, RunnerLimits, prompt_scores
from quire.runner.step_inputs import RowSettings, StepInputs, TokenInputs, step_inputs, token_inputs
from quire.sampling.records import Sampled, SampleRequests, TokenMask

MAX_TAPES = 64  # shapes kept of each kind; recording costs little more than an ordinary pass
MAX_PROMPT_TOKENS = 256  # of a recorded pass with prompts: Python's share of a longer one is small
T = TypeVar("T")


class Rows:
    """Token ids and block tables by row, in host memory. Untouched rows cost no memory."""

    def __init__(
        self, max_rows: int, max_model_len: int, block_size: int, vocab_size: int, num_groups: int = 1
    ) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        self.num_groups = num_groups
        self.token_ids = torch.zeros(max_rows, max_model_len, dtype=torch.int32)  # [max_rows, max_len]
        self.tokens = self.token_ids.numpy()  # the same memory
        # [groups, max_rows, max_blocks] block ids
        self.tables = np.zeros((num_groups, max_rows, self.max_blocks), np.int32)
        self.settings = RowSettings(max_rows, vocab_size)

    def apply(self, step: Step) -> None:
        """Starts rows, writes forced tokens, drafts and table entries, in this order."""
        for start in step.starts:
            self._start(start)
        if step.forced_rows:
            self.tokens[np.asarray(step.forced_rows), np.asarray(step.forced_positions)] = step.forced_tokens
        for draft in step.drafts:
            self.tokens[draft.row, draft.position : draft.position + len(draft.token_ids)] = draft.token_ids
        if step.table_rows:
            places, groups = np.divmod(np.asarray(step.table_indices), self.num_groups)
            self.tables[groups, np.asarray(step.table_rows), places] = step.table_blocks

    def _start(self, start: RowStart) -> None:
        self.tokens[start.row, : len(start.token_ids)] = start.token_ids
        for group in range(self.num_groups):
            blocks = start.block_ids[group :: self.num_groups]
            self.tables[group, start.row, : len(blocks)] = blocks
        self.settings.start(start)


class Buffer:
    """Persistent memory, as a tensor for kernels and an array for the host."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._tensor = torch.zeros(shape, dtype=dtype)
        self._device = None if device.type == "cpu" else device
        self.array = self._tensor.numpy()

    def put(self, values: np.ndarray) -> Tensor:
        self.array[: len(values)] = values
        return self.first(len(values))

    def first(self, count: int) -> Tensor:
        """The values on the device: on the CPU the same memory, elsewhere a copy."""
        values = self._tensor[:count]
        return values if self._device is None else values.to(self._device)


class Assembler:
    """Gathers a step's inputs from the rows into one ragged Batch.

    Buffers live as long as the runner, so that a recorded pass finds its inputs where they were.
    """

    def __init__(
        self,
        rows: Rows,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._rows = rows
        self._adapters = adapters
        self._block_size = block_size
        self._token_ids = Buffer((max_tokens,), torch.int32, device)
        self._positions = Buffer((max_tokens,), torch.int32, device)
        groups = range(rows.num_groups)
        self._slots = [Buffer((max_tokens,), torch.int64, device) for _ in groups]
        self._query_starts = Buffer((max_rows + 1,), torch.int32, device)
        self._context_lens = Buffer((max_rows,), torch.int32, device)
        self._tables = [Buffer((max_rows, rows.max_blocks), torch.int32, device) for _ in groups]
        self._tree_starts = Buffer((max_tokens,), torch.int32, device)
        self._ancestors = Buffer((max_tokens,), torch.int64, device)
        self._logits_indices = Buffer((max_tokens + max_rows,), torch.int64, device)

    def assemble(self, tokens: TokenInputs, all_sampled: bool) -> Batch:
        rows, trees = tokens.inputs.rows, tokens.trees
        token_rows, places = tokens.token_rows(), tokens.places()
        lora = wanted_lora = None
        if self._adapters is not None and self._adapters.runs_in(rows):
            lora = self._adapters.of_tokens(token_rows)
            wanted_lora = lora if all_sampled else self._adapters.of_wanted(token_rows[tokens.wanted])
        self._query_starts.array[1 : len(rows) + 1] = tokens.ends  # before them stays 0
        masks = None
        if trees is not None:
            masks = TreeMasks(self._tree_starts.put(trees.starts), self._ancestors.put(trees.ancestors))
        longest = int(tokens.contexts.max())
        first, *more = (
            self._group(group, token_rows, places, rows, longest) for group in range(self._rows.num_groups)
        )
        return Batch(
            token_ids=self._token_ids.put(self._rows.tokens[token_rows, places]),
            positions=self._positions.put(places if trees is None else trees.positions),
            slots=first.slots,
            query_starts=self._query_starts.first(len(rows) + 1),
            context_lens=self._context_lens.put(tokens.contexts),
            block_tables=first.block_tables,
            logits_indices=self._logits_indices.put(tokens.wanted),
            trees=masks,
            lora=lora,
            wanted_lora=wanted_lora,
            more_groups=tuple(more),
        )

    def _group(
        self, group: int, token_rows: np.ndarray, places: np.ndarray, rows: np.ndarray, longest: int
    ) -> GroupTables:
        """Slots of tokens in one group of layers, and the tables of rows as far as the longest goes."""
        tables, gathered, size = self._rows.tables[group], self._tables[group], self._block_size
        width = -(-longest // size)
        gathered.array[: len(rows), :width] = tables[rows, :width]
        slots = self._slots[group].put(self._slots_of(group, token_rows, places))
        return GroupTables(slots, gathered.first(len(rows)))

    def _slots_of(self, group: int, token_rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        blocks = self._rows.tables[group][token_rows, places // self._block_size].astype(np.int64)
        return blocks * self._block_size + places % self._block_size


@dataclass(frozen=True, slots=True)
class _Recorded:
    tape: Tape
    batch: Batch  # its tensors are what the tape reads
    logits: Tensor  # [samples, vocab], what the tape writes


_Shape = tuple[int, int, int, bool, int]  # rows, tokens, samples, whether there are trees, adapters' kinds


class Tapes:
    """Passes by their shape: recorded once and replayed without Python.

    A pass has the same operations whenever it has as many rows, tokens and samples. How the tokens are spread over the
    rows is read from the batch's tensors, as everything that changes. Passes whose tokens are all sampled are recorded
    when they first come. Others, which have prompts, if they are short and their shape comes again: chunks of prompts
    beside decodes do so, and while Python calls every layer the pool's threads wait.
    """

    def __init__(self, model: DecoderModel, pool: Pool) -> None:
        self._model = model
        self._pool = pool
        self._arena = Arena()  # one pass runs at a time, so all shapes share their memory
        self._decodes = OrderedDict[_Shape, _Recorded | None]()
        self._prompts = OrderedDict[_Shape, _Recorded | None]()  # None: has come once

    def logits(self, batch: Batch, all_sampled: bool) -> Tensor | None:
        """[samples, vocab] float32, valid until the next call; None: such a pass is not recorded."""
        num_rows, num_tokens = len(batch.context_lens), len(batch.token_ids)
        kinds = 0 if batch.lora is None else batch.lora.kinds  # of layers that call the adapters' kernel too
        num_samples = num_tokens if batch.logits_indices is None else len(batch.logits_indices)
        if not all_sampled and (kinds or num_samples == 0 or num_tokens > MAX_PROMPT_TOKENS):
            return None
        shape = num_rows, num_tokens, num_samples, batch.trees is not None, kinds
        passes = self._decodes if all_sampled else self._prompts
        is_known = shape in passes
        recorded = passes.pop(shape, None)
        if recorded is not None:
            recorded.tape.replay()
        elif is_known or all_sampled:
            recorded = self._record(batch)
        passes[shape] = recorded
        if len(passes) > MAX_TAPES:
            passes.popitem(last=False)
        return recorded.logits if recorded is not None else None

    def _record(self, batch: Batch) -> _Recorded:
        with Tape(self._arena) as tape:
            logits = self._arena.borrowed(self._model.logits(self._model(batch, self._pool), batch.lora))
        return _Recorded(tape, batch, logits)


class CpuOps:
    """A worker thread runs the steps in order: the caller plans the next one meanwhile."""

    compiles = False
    tiles = ""
    rows_type: type[Rows] = Rows
    assembler_type: type[Assembler] = Assembler

    def __init__(
        self,
        model: DecoderModel,
        pool: Pool,
        limits: RunnerLimits,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        block_size = pool.layout.block_size
        self._device = device
        self._model = model
        self._pool = pool
        self._adapters = adapters
        vocab_size, num_groups = model.config.vocab_size, pool.layout.num_groups
        self._rows = self.rows_type(
            limits.max_num_seqs, limits.max_model_len, block_size, vocab_size, num_groups
        )
        self._assembler = self.assembler_type(
            self._rows, limits.max_num_seqs, limits.max_num_batched_tokens, block_size, device, adapters
        )
        self._tapes = Tapes(model, pool) if limits.record_decodes else None
        self._worker = ThreadPoolExecutor(1, "quire-runner", initializer=keep_threads())
        self.row_tokens = self._rows.token_ids
        self.row_tables = torch.from_numpy(self._rows.tables)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._worker.submit(work)

    def change_rows(self, step: Step) -> None:
        self._rows.apply(step)

    def forward(self, step: Step) -> ForwardPass:
        return self._forward(step_inputs(step, self._rows.settings))

    def _forward(self, inputs: StepInputs) -> ForwardPass:
        tokens = token_inputs(inputs)
        all_sampled = tokens.are_all_sampled
        batch = self._assembler.assemble(tokens, all_sampled)
        if self._tapes is not None and not inputs.scored and self._may_record(batch):
            logits = self._tapes.logits(batch, all_sampled)
            if logits is not None:
                return ForwardPass(inputs, tokens.sample_positions, logits)
        return self._scored(tokens, self._model(batch, self._pool))

    def _scored(self, tokens: TokenInputs, hidden: Tensor) -> ForwardPass:
        """hidden [L, width] of the wanted tokens -> logits of samples, logprobs of prompts."""
        inputs, scores = tokens.inputs, tuple[PromptLogprobs, ...]()
        if inputs.scored:
            scores = prompt_scores(self._model, hidden, inputs, self.row_tokens, self._adapters)
        logits = None
        if num_samples := len(inputs.sample_rows):
            lora = self._adapters.of_head(tokens.wanted_rows()) if self._adapters is not None else None
            logits = self._model.logits(hidden[:num_samples], lora)
        return ForwardPass(inputs, tokens.sample_positions, logits, scores)

    def _may_record(self, batch: Batch) -> bool:
        return batch.lora is None or (self._adapters is not None and self._adapters.recordable)

    def sample_requests(self, forward: ForwardPass, mask: TokenMask | None) -> SampleRequests:
        return SampleRequests(
            forward.inputs.sample_rows,
            forward.sample_positions,
            self._rows.settings.columns,
            self.row_tokens.to(self._device),  # on the CPU the same memory
            mask,
            beams=forward.inputs.step.beams,
        )

    def write_tokens(self, forward: ForwardPass, sampled: Sampled) -> None:
        self._rows.tokens[forward.inputs.sample_rows, forward.sample_positions] = (
            sampled.token_ids.cpu().numpy()
        )

    def to_host(self, sampled: Sampled | None, num_samples: int) -> HostSamples:
        """Everything is there already."""
        if sampled is None:
            nothing = torch.zeros(0, dtype=torch.int64)
            return HostSamples(nothing, nothing.bool(), ended=time.perf_counter())
        token_ids, finite = sampled.token_ids.cpu(), sampled.finite.cpu()
        return HostSamples(token_ids, finite, sampled, sampled.beams, ended=time.perf_counter())

    def eager(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, seconds: float) -> int:
        return 0

    def prepare_thread(self) -> None:
        pass

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        release_freed()
