"""CudaOps: rows live on the GPU. The host sends integers, queues passes on a stream, and reads tokens one step late."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.layout import BlockLayout
from quire.core.step import Step
from quire.kernels import choose
from quire.kernels.attention import cudnn
from quire.kernels.sm_share import use_stream
from quire.layers.attention import Pool
from quire.layers.lora import LoraBatch
from quire.models.model import DecoderModel
from quire.runner.adapters import AdapterSlots
from quire.runner.device_inputs import DeviceInputs, VerifyInputs
from quire.runner.device_ops import ForwardPass, HostSamples, RunnerLimits, prompt_scores
from quire.runner.graphs import Graphs
from quire.runner.step_inputs import RowSettings, StepInputs, TokenInputs, step_inputs, token_inputs
from quire.sampling.beams import on_host
from quire.sampling.columns import DeviceColumns
from quire.sampling.logprobs import on_host as logprobs_on_host
from quire.sampling.records import BeamTensors, Sampled, SampleRequests, TokenMask

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    """Work that was done when it was submitted."""

    value: T

    def result(self) -> T:
        return self.value


class CudaOps:
    """Everything is queued on one stream, in order: nothing here waits.

    A step takes the first of these that it fits: a decode, rows with prompts or a verification of drafts, each of
    a size that graphs are captured for, or a pass without a graph. Runs on a CPU too, through the reference kernels and
    without graphs.
    """

    compiles = True
    inputs_type: type[DeviceInputs] = DeviceInputs

    def __init__(
        self,
        model: DecoderModel,
        pool: Pool,
        limits: RunnerLimits,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._device = device
        self._adapters = adapters
        self._model = model
        self._pool = pool
        self._limits = limits
        self._settings = RowSettings(limits.max_num_seqs, model.config.vocab_size)
        planner = attention_planner(model.config, limits, pool.layout, device)
        self.tiles: str = getattr(planner, "tiles", "")
        max_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self._inputs = self.inputs_type(
            limits.max_num_seqs,
            max_tokens,
            limits.max_model_len,
            pool.layout.block_size,
            device,
            planner,
            self._stops(),
            pool.layout.num_groups,
        )
        self._drafts = VerifyInputs(self._inputs, limits.max_num_seqs, max_tokens)
        self._columns = DeviceColumns(self._settings.columns, device)
        self._graphs: Graphs | None = None
        if device.type == "cuda" and limits.record_decodes:
            self._graphs = Graphs(
                model,
                pool,
                self._inputs,
                self._drafts,
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                adapters,
            )
        self.row_tokens = self._inputs.row_tokens
        self.row_tables = self._inputs.row_tables

    def submit(self, work: Callable[[], T]) -> _Done[T]:
        use_stream()  # the caller may be any thread
        return _Done(work())

    def change_rows(self, step: Step) -> None:
        for start in step.starts:
            self._settings.start(start)
        self._columns.update(np.array([start.row for start in step.starts], np.int64))
        self._inputs.apply(step)

    # ------------------------------------------------------------------ the pass

    def forward(self, step: Step) -> ForwardPass:
        """Queues everything up to the logits of the sampled rows."""
        return self._forward(step_inputs(step, self._settings))

    def _forward(self, inputs: StepInputs) -> ForwardPass:
        rows = inputs.rows
        adapters = self._adapters if self._adapters is not None and self._adapters.runs_in(rows) else None
        if not inputs.is_decode:
            return self._forward_tokens(inputs, adapters)
        adapted = adapters is not None
        padded = self._graphs.padded_rows(len(rows), adapted) if self._graphs is not None else 0
        size = self._inputs.stage_decode(inputs, padded)
        lora = adapters.of_tokens(rows, size) if adapters is not None else None
        if self._graphs is not None:
            hidden = self._graphs.decode(size, adapted)
        else:
            hidden = self._model(self._inputs.decode(size, lora), self._pool)
        num_samples = len(inputs.sample_rows)
        logits = self._logits(hidden, num_samples, _of_head(adapters, lora))
        positions = inputs.computed.astype(np.int64) + 1
        return ForwardPass(inputs, positions, logits, (), *self._inputs.decode_samples(num_samples))

    def _forward_tokens(self, inputs: StepInputs, adapters: AdapterSlots | None) -> ForwardPass:
        tokens = token_inputs(inputs)
        if inputs.step.drafts:
            fitted = self._forward_drafts(tokens) if adapters is None else None
        else:
            fitted = self._forward_prompts(tokens, adapters)
        return fitted or self._forward_mixed(tokens, adapters)

    def _forward_prompts(self, tokens: TokenInputs, adapters: AdapterSlots | None) -> ForwardPass | None:
        """A step with prompts that fits a graph; None if it does not."""
        inputs = tokens.inputs
        num_samples = len(inputs.sample_rows)
        if self._graphs is None or inputs.scored:
            return None
        shape = self._graphs.prompt_shape(tokens.num_tokens, max(len(inputs.rows), num_samples))
        if shape is None:
            return None
        self._inputs.stage_prompts(tokens, shape.size, shape.rows)
        wanted = None
        if adapters is not None:
            adapters.of_tokens(tokens.token_rows(), shape.size)
            wanted = adapters.of_wanted(tokens.wanted_rows(), shape.rows)
        hidden = self._graphs.prompts(shape, adapters is not None)
        logits = self._logits(hidden, num_samples, _of_head(adapters, wanted)) if num_samples else None
        samples = self._inputs.prompt_samples(shape.rows, num_samples)
        return ForwardPass(inputs, tokens.sample_positions, logits, (), *samples)

    def _forward_drafts(self, tokens: TokenInputs) -> ForwardPass | None:
        """A step that verifies drafts and fits a graph; None if it does not."""
        size = self._drafts.size_for(tokens) if self._graphs is not None else None
        if self._graphs is None or size is None:
            return None
        self._drafts.stage(tokens, size)
        count = len(tokens.inputs.sample_rows)
        logits = self._logits(self._graphs.drafts(size, tokens.trees is not None), count)
        samples = self._drafts.samples(size, count)
        return ForwardPass(tokens.inputs, tokens.sample_positions, logits, (), *samples)

    def _forward_mixed(self, tokens: TokenInputs, adapters: AdapterSlots | None) -> ForwardPass:
        inputs = tokens.inputs
        mixed = self._inputs.stage_mixed(tokens, adapters)
        num_samples = len(inputs.sample_rows)
        hidden = self._model(mixed.batch, self._pool)
        scores = prompt_scores(self._model, hidden, inputs, self.row_tokens, adapters)
        logits = None
        if num_samples:
            lora = adapters.of_head(tokens.wanted_rows()) if adapters is not None else None
            logits = self._logits(hidden, num_samples, lora)
        return ForwardPass(
            inputs, tokens.sample_positions, logits, scores, mixed.sample_rows, mixed.sample_positions
        )

    def _logits(self, hidden: Tensor, num_samples: int, lora: LoraBatch | None = None) -> Tensor:
        """Of the first rows. A few more are multiplied, as in a graph of these rows: GEMMs were measured so."""
        count = num_samples
        if self._graphs is not None and lora is None and num_samples <= self._limits.max_num_seqs:
            count = min(self._graphs.padded_rows(num_samples), len(hidden))
        return self._model.logits(hidden[:count], lora)[:num_samples]

    # ------------------------------------------------------------------ samples

    def sample_requests(self, forward: ForwardPass, mask: TokenMask | None) -> SampleRequests:
        return SampleRequests(
            forward.inputs.sample_rows,
            forward.sample_positions,
            self._settings.columns,
            self.row_tokens,
            mask,
            forward.device_rows,
            forward.device_positions,
            self._columns,
            forward.inputs.step.beams,
        )

    def write_tokens(self, forward: ForwardPass, sampled: Sampled) -> None:
        rows, positions = forward.device_rows, forward.device_positions
        assert rows is not None
        assert positions is not None
        self.row_tokens[rows.long(), positions.long()] = sampled.token_ids.int()

    def to_host(self, sampled: Sampled | None, num_samples: int) -> HostSamples:
        token_ids = self._host_memory(num_samples, torch.int64)
        finite = self._host_memory(num_samples, torch.bool)
        beams: tuple[BeamTensors, ...] = ()
        if sampled is not None:
            sampled = logprobs_on_host(sampled)
            token_ids.copy_(sampled.token_ids, non_blocking=True)
            finite.copy_(sampled.finite, non_blocking=True)
            beams = on_host(sampled.beams)
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return HostSamples(token_ids, finite, sampled, beams, arrived)

    def _host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._device.type == "cuda")

    # ------------------------------------------------------------------ start and end

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Passes run without graphs: nothing should compile for the first time inside a graph."""
        graphs, self._graphs = self._graphs, None
        yield
        self._graphs = graphs

    def capture(self, seconds: float) -> int:
        return self._graphs.capture(seconds) if self._graphs is not None else 0

    def prepare_thread(self) -> None:
        """Makes long prompts' kernel plans for every length that it will meet; a thread has plans of its own."""
        limits, config = self._limits, self._model.config
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        for stop in self._stops():
            cudnn.prepare(*heads, limits.activation_dtype, self._device, stop, limits.max_num_batched_tokens)

    def _stops(self) -> tuple[int, ...]:
        """Lengths of prompts that may go through a contiguous kernel: it knows half precision only, and no order."""
        limits = self._limits
        if self._device.type != "cuda" or limits.activation_dtype.itemsize != 2 or limits.deterministic:
            return ()
        return cudnn.stops(limits.max_num_batched_tokens, limits.max_model_len)

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _of_head(adapters: AdapterSlots | None, rows: LoraBatch | None) -> LoraBatch | None:
    """The rows' adapters for the output head, if any adds to it."""
    return rows if adapters is not None and adapters.adds_to_head else None


def attention_planner(
    config: ModelConfig, limits: RunnerLimits, layout: BlockLayout, device: torch.device
) -> Any:
    """What divides attention's work on this device; None where its kernel needs none."""
    planner = getattr(choose("attention", device), "StepPlanner", None)
    if planner is None:
        return None
    return planner(
        limits.max_num_seqs + 1,  # and a row of padding
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        device,
        max_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs),
        max_context=limits.max_model_len,
        block_size=layout.block_size,
        kv_dtype=layout.dtype,
        dtype=limits.activation_dtype,
        deterministic=limits.deterministic,
    )
