"""DeviceRunner: executes Steps on a GPU. The host sends integers, launches, and reads tokens one step late."""

import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import DeviceMemoryFull
from quire.core.ints import Ints, ints
from quire.core.layout import BlockLayout
from quire.core.step import PromptLogprobs, Step, StepResult
from quire.kernels import choose
from quire.kernels.attention import cudnn
from quire.layers.lora import MANY_FROM, LoraBatch
from quire.layers.pool import Pool
from quire.models.model import Model
from quire.runner.adapters import AdapterSlots
from quire.runner.backlog import PendingWork
from quire.runner.device_inputs import SMALL_ROWS, DeviceInputs, Staged
from quire.runner.fake_steps import PROMPT, fake_steps
from quire.runner.graphs import Graphs
from quire.runner.packing import Sections, send
from quire.runner.proposals import Proposals, choose_tokens
from quire.runner.rows import RowSettings
from quire.runner.runner import RunnerLimits
from quire.runner.scored import ScoredRow
from quire.runner.transfer import TransferEngine
from quire.runner.trees import verified_trees
from quire.runner.verify_inputs import VerifyInputs
from quire.sampling.beams import candidate_records, on_host
from quire.sampling.device_columns import DeviceColumns
from quire.sampling.logprobs import logprob_entries, prompt_logprobs
from quire.sampling.logprobs import on_host as logprobs_on_host
from quire.sampling.records import BeamTensors, Sampled, SampleRequests, TokenMask
from quire.sampling.sampler import Sampler

SCORED_PER_PASS = 256  # prompt positions turned into logits at once: bounds memory, not speed


@dataclass(slots=True)
class _Launched:
    """A step on the device."""

    step: Step
    staged: Staged
    logits: Tensor | None  # [S, vocab]; used up by sampling
    rows: Tensor  # [S] ints, on the device
    positions: Tensor  # [S] ints, on the device
    scored: tuple[PromptLogprobs, ...]
    started: float
    sampled: Sampled | None = None  # its logprobs in host memory
    token_ids: Tensor | None = None  # [S] int64 in host memory
    good: Tensor | None = None  # [S] bool in host memory
    beams: tuple[BeamTensors, ...] = ()  # in host memory
    drawn: tuple[Ints, ...] = ()
    arrived: torch.cuda.Event | None = None  # None on the CPU, where nothing is ever late


class DeviceRunner:
    """Everything is queued on one stream, in order: nothing here waits but `collect`."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        limits: RunnerLimits,
        device: torch.device | str,
        proposals: Proposals | None = None,  # None: no drafts are drawn
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._proposals = proposals
        self._device = torch.device(device)
        self._adapters = adapters
        self._model = model
        self._pool = pool
        self._limits = limits
        self._settings = RowSettings(limits.max_num_seqs, model.config.vocab_size)
        planner = attention_planner(model.config, limits, pool.layout, self._device)
        self.tiles: str = getattr(planner, "tiles", "")  # attention's: "tuned", "default" or "fixed"
        self._inputs = DeviceInputs(
            self._settings,
            limits.max_num_seqs,
            max(limits.max_num_batched_tokens, limits.max_num_seqs),
            limits.max_model_len,
            pool.layout.block_size,
            self._device,
            planner,
            self._stops(limits),
        )
        max_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self._drafts = VerifyInputs(self._inputs, self._settings, limits.max_num_seqs, max_tokens)
        self._columns = DeviceColumns(self._settings.columns, self._device)
        self._sampler = Sampler(self._device)
        self._pages = choose("pages", self._device)
        self._trees = choose("trees", self._device)
        self.mover: TransferEngine | None = None  # None: nothing leaves the pool
        self._graphs: Graphs | None = None
        if self._device.type == "cuda" and limits.record_decodes:
            self._graphs = Graphs(
                model,
                pool,
                self._inputs,
                self._drafts,
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                adapters,
            )
        self._before_pass = PendingWork()
        self._launched: deque[_Launched] = deque()
        self._last_arrival = 0.0

    def warm_up(self, seconds: float) -> int:
        """Runs a step of each kind, so that nothing compiles under a request, then captures graphs for about so long.

        Returns how many were captured; the others follow when they are needed. Only block 0 is written.
        """
        self.prepare_thread()
        graphs, self._graphs = self._graphs, None  # nothing should compile for the first time inside a graph
        self._run_fakes()
        if self._adapters is not None and self._adapters.kinds:
            with self._adapters.pretending():
                self._run_fakes()
                for prompt in (MANY_FROM, 4 * MANY_FROM):  # segments are longer there, and cut otherwise
                    self._run_fakes(prompt)
        self._graphs = graphs
        if graphs is None:
            return 0
        with torch.inference_mode():
            return graphs.capture(seconds)

    def _run_fakes(self, prompt: int = PROMPT) -> None:
        limits = self._limits
        for step in fake_steps(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.max_model_len,
            self._pool.layout.block_size,
            prompt,
        ):
            self.launch(step)
            self.collect()

    def prepare_thread(self) -> None:
        """Long prompts' kernel plans for every length that it will meet; it forgets plans of other threads."""
        limits, config = self._limits, self._model.config
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        for stop in self._stops(limits):
            cudnn.prepare(*heads, limits.activation_dtype, self._device, stop, limits.max_num_batched_tokens)

    def _stops(self, limits: RunnerLimits) -> tuple[int, ...]:
        """Lengths of prompts that may go through the contiguous kernel."""
        if not self._reads_fresh(limits):
            return ()
        return cudnn.stops(limits.max_num_batched_tokens, limits.max_model_len)

    def _reads_fresh(self, limits: RunnerLimits) -> bool:
        """Whether long prompts may go through a contiguous kernel: it knows half precision only, and no order."""
        return (
            self._device.type == "cuda" and limits.activation_dtype.itemsize == 2 and not limits.deterministic
        )

    # ------------------------------------------------------------------ the three calls

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Queues the forward pass, and sampling unless it waits for a mask. Raises DeviceMemoryFull.

        Then the pass and its tokens are nobody's. What a step does before its pass is kept and done with the next,
        since others count on it: rows that start without advancing, blocks that leave, adapters of later steps.
        """
        self._add_to_backlog(step)
        with _taken_back_if_full(step):
            self._before_pass.do()
            launched = self._forward(step)
            if not step.masked:
                self._sample(launched, None)
        self._launched.append(launched)

    @torch.inference_mode()
    def mask(self, mask: TokenMask) -> None:
        """Samples the step that was launched last, which waited for this. Raises DeviceMemoryFull, as `launch` does."""
        launched = self._launched.pop()
        with _taken_back_if_full(launched.step):
            self._sample(launched, mask)
        self._launched.append(launched)

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected; waits for it."""
        launched = self._launched.popleft()
        if launched.arrived is not None:
            launched.arrived.synchronize()
        if launched.token_ids is None or launched.good is None:
            raise RuntimeError("a step that waits for its mask was collected before it had one")
        good = launched.good.numpy()
        now = time.perf_counter()
        seconds = now - max(launched.started, self._last_arrival)
        self._last_arrival = now
        return StepResult(
            step_id=launched.step.step_id,
            token_ids=ints(launched.token_ids.tolist()),
            logprobs=logprob_entries(launched.sampled) if launched.sampled is not None else (),
            prompt_logprobs=launched.scored,
            failed=() if good.all() else tuple(np.flatnonzero(~good).tolist()),
            seconds=seconds,
            beams=candidate_records(launched.beams),
            drawn=launched.drawn,
        )

    def close(self) -> None:
        self._launched.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.mover is not None:
            self.mover.close()

    # ------------------------------------------------------------------ before the pass

    def _add_to_backlog(self, step: Step) -> None:
        """Each piece may be done again where it came halfway only."""
        add = self._before_pass.add
        if step.starts or step.forced_rows or step.table_rows or step.drafts:
            add(lambda: self._change_rows(step))
        if (mover := self.mover) is not None:
            add(lambda: mover.move(step))
        if (adapters := self._adapters) is not None:
            fetched = adapters.fetch(step)  # now: host copies are held for no longer
            add(lambda: adapters.apply(step, fetched))
        if step.copy_sources:
            add(lambda: self._copy_pages(step))

    def _change_rows(self, step: Step) -> None:
        for start in step.starts:
            self._settings.start(start)
        self._columns.update(np.array([start.row for start in step.starts], np.int64))
        self._inputs.apply(step)

    def _copy_pages(self, step: Step) -> None:
        copies = send(np.array([step.copy_sources, step.copy_targets], np.int32), self._device)
        self._pages.copy_blocks(self._pool.data, *copies.long().unbind(0))

    # ------------------------------------------------------------------ the pass

    def _forward(self, step: Step) -> _Launched:
        """Queues everything up to the logits of the sampled rows."""
        started = time.perf_counter()
        rows = np.asarray(step.rows, np.int64)
        adapters = self._adapters if self._adapters is not None and self._adapters.runs_in(rows) else None
        adapted = adapters is not None
        padded = self._graphs.padded_rows(len(rows), adapted) if self._graphs is not None else 0
        staged = self._inputs.stage_decode(step, padded)
        if staged is None:
            if step.drafts:
                fitted = self._forward_drafts(step, started) if adapters is None else None
            else:
                fitted = self._forward_small(step, rows, started, adapters)
            return fitted or self._forward_mixed(step, rows, started, adapters)
        num_samples = len(staged.sample_rows)
        lora = adapters.of_tokens(rows, staged.size) if adapters is not None else None
        if self._graphs is not None:
            hidden = self._graphs.decode(staged.size, adapted)
        else:
            hidden = self._model(self._inputs.decode(staged.size, lora), self._pool)
        logits = self._logits(hidden, num_samples, _of_head(adapters, lora))
        return _Launched(step, staged, logits, *self._inputs.decode_samples(num_samples), (), started)

    def _forward_small(
        self, step: Step, rows: np.ndarray, started: float, adapters: AdapterSlots | None
    ) -> _Launched | None:
        """A step with prompts that fits a graph; None if it does not."""
        num_samples = len(step.sample_rows)
        if self._graphs is None or not num_samples or max(len(step.rows), num_samples) >= SMALL_ROWS:
            return None
        padded = self._graphs.padded_tokens(step.total_tokens)
        if padded is None or self._settings.wants_prompt_logprobs(step.rows):
            return None
        staged = self._inputs.stage_small(step, padded)
        wanted = None
        if adapters is not None:
            adapters.of_tokens(np.repeat(rows, np.asarray(step.num_tokens)), padded)
            wanted = adapters.of_wanted(rows[np.asarray(step.sample_sources)], SMALL_ROWS)
        hidden = self._graphs.prompts(padded, adapters is not None)
        logits = self._logits(hidden, num_samples, _of_head(adapters, wanted))
        return _Launched(step, staged, logits, *self._inputs.small_samples(num_samples), (), started)

    def _forward_drafts(self, step: Step, started: float) -> _Launched | None:
        """A step that verifies drafts and fits a graph; None if it does not."""
        size = self._drafts.size_for(step) if self._graphs is not None else None
        if self._graphs is None or size is None:
            return None
        staged, has_trees = self._drafts.stage(step, size)
        count = len(staged.sample_rows)
        logits = self._logits(self._graphs.drafts(size, has_trees), count)
        return _Launched(step, staged, logits, *self._drafts.samples(size, count), (), started)

    def _forward_mixed(
        self, step: Step, rows: np.ndarray, started: float, adapters: AdapterSlots | None
    ) -> _Launched:
        staged, mixed = self._inputs.stage_mixed(step, adapters)
        num_samples = len(staged.sample_rows)
        hidden = self._model(mixed.batch, self._pool)
        scored = []
        first = num_samples
        for row in staged.scored:
            scored.append(self._score(row, hidden[first : first + row.count], adapters))
            first += row.count
        logits = None
        if num_samples:
            lora = adapters.of_head(rows[np.asarray(step.sample_sources)]) if adapters is not None else None
            logits = self._logits(hidden, num_samples, lora)
        return _Launched(
            step, staged, logits, mixed.sample_rows, mixed.sample_positions, tuple(scored), started
        )

    def _logits(self, hidden: Tensor, num_samples: int, lora: LoraBatch | None = None) -> Tensor:
        """Of the first lines. A few more are multiplied, as in a graph of these rows: products were measured so."""
        count = num_samples
        if self._graphs is not None and lora is None and num_samples <= self._limits.max_num_seqs:
            count = min(self._graphs.padded_rows(num_samples), len(hidden))
        return self._model.logits(hidden[:count], lora)[:num_samples]

    def _score(self, scored: ScoredRow, hidden: Tensor, adapters: AdapterSlots | None) -> PromptLogprobs:
        """Waits for the device: whoever wants every prompt token's logprobs reads far more than one token."""
        following = self._inputs.row_tokens[scored.row, scored.first + 1 : scored.first + 1 + scored.count]
        entries = []
        for start in range(0, scored.count, SCORED_PER_PASS):
            lines = hidden[start : start + SCORED_PER_PASS]
            lora = adapters.of_head(np.full(len(lines), scored.row)) if adapters is not None else None
            logits = self._model.logits(lines, lora)
            entries += prompt_logprobs(logits, following[start : start + SCORED_PER_PASS], scored.num_top)
        return PromptLogprobs(scored.row, scored.first + 1, tuple(entries))

    def _sample(self, launched: _Launched, mask: TokenMask | None) -> None:
        staged = launched.staged
        launched.token_ids = self._on_host(len(staged.sample_rows), torch.int64)
        launched.good = self._on_host(len(staged.sample_rows), torch.bool)
        if launched.logits is not None:
            rows, positions = launched.rows, launched.positions
            requests = SampleRequests(
                staged.sample_rows,
                staged.sample_positions,
                self._settings.columns,
                self._inputs.row_tokens,
                mask,
                rows,
                positions,
                self._columns,
                launched.step.beams,
            )
            sampled, launched.drawn = choose_tokens(
                self._proposals, self._sampler, launched.logits, requests, launched.step
            )
            if not self._sampler.writes_tokens:
                self._inputs.row_tokens[rows.long(), positions.long()] = sampled.token_ids.int()
            if launched.step.drafts:
                self._settle(launched.step, sampled)
            launched.logits = None
            launched.sampled = logprobs_on_host(sampled)
            launched.token_ids.copy_(sampled.token_ids, non_blocking=True)
            launched.good.copy_(sampled.finite, non_blocking=True)
            launched.beams = on_host(sampled.beams)
        if self._device.type == "cuda":
            launched.arrived = torch.cuda.Event()
            launched.arrived.record()

    def _settle(self, step: Step, sampled: Sampled) -> None:
        """Rows and pages go on with what was accepted of their trees."""
        verified = verified_trees(step)
        if verified is None:
            return
        sections = Sections([verified.trees.reshape(-1), verified.nodes.reshape(-1)])
        trees, nodes = sections.split(send(sections.packed, self._device))
        self._trees.settle(
            sampled.token_ids,
            trees.view(verified.trees.shape),
            nodes.view(verified.nodes.shape),
            self._inputs.row_tokens,
            self._inputs.row_tables,
            self._pool.data,
            self._pool.layout.block_size,
            2 * self._pool.layout.num_layers,
        )

    def _on_host(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._device.type == "cuda")


@contextmanager
def _taken_back_if_full(step: Step) -> Iterator[None]:
    """Memory that torch could not find becomes DeviceMemoryFull, and what the step held by then is given up."""
    why = ""
    try:
        yield
    except torch.OutOfMemoryError as error:
        why = str(error) or type(error).__name__
        traceback.clear_frames(error.__traceback__)  # which hold all that the pass had computed so far
    if why:
        torch.cuda.empty_cache()
        raise DeviceMemoryFull(
            f"a step of {step.total_tokens} tokens did not fit the GPU's memory ({why}): lower "
            "max_num_batched_tokens or gpu_memory_utilization"
        )


def _of_head(adapters: AdapterSlots | None, lines: LoraBatch | None) -> LoraBatch | None:
    """The lines' adapters for the output head, if any adds to it."""
    return lines if adapters is not None and adapters.adds_to_head else None


def attention_planner(
    config: ModelConfig, limits: RunnerLimits, layout: BlockLayout, device: torch.device
) -> Any:
    """What divides attention's work on this device; None where its kernel needs none."""
    planner = getattr(choose("attention", device), "StepPlanner", None)
    if planner is None:
        return None
    return planner(
        limits.max_num_seqs,
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
