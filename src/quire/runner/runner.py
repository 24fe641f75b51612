"""Runner: executes Steps on one device, in order. `launch` and `collect` are two calls."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from quire.core.ints import Ints, ints
from quire.core.step import PromptLogprobs, Step, StepResult
from quire.kernels import choose
from quire.layers.batch import Batch
from quire.layers.lora import LoraBatch
from quire.layers.pool import Pool
from quire.models.model import Model
from quire.runner.adapters import AdapterSlots, Fetched
from quire.runner.assembly import Assembled, Assembler
from quire.runner.proposals import Proposals, choose_tokens
from quire.runner.recorded import RecordedDecodes
from quire.runner.rows import Rows
from quire.runner.scored import ScoredRow
from quire.runner.transfer import TransferEngine
from quire.runner.trees import verified_trees
from quire.sampling.beams import candidate_records
from quire.sampling.logprobs import logprob_entries, prompt_logprobs
from quire.sampling.records import Sampled, SampleRequests, TokenMask
from quire.sampling.sampler import Sampler

SCORED_PER_PASS = 256  # prompt positions turned into logits at once: bounds memory, not speed


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    record_decodes: bool  # replay decode passes instead of calling every layer
    activation_dtype: torch.dtype = torch.float32
    deterministic: bool = False  # on a GPU: a request's tokens do not depend on its neighbours


class Runner:
    """The forward pass and sampling, in a worker thread: the caller plans the next step meanwhile."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        limits: RunnerLimits,
        device: torch.device | str = "cpu",
        proposals: Proposals | None = None,  # None: no drafts are drawn
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._proposals = proposals
        self._device = torch.device(device)
        block_size = pool.layout.block_size
        self._model = model
        self._pool = pool
        self._rows = Rows(limits.max_num_seqs, limits.max_model_len, block_size, model.config.vocab_size)
        self._adapters = adapters
        self._assembler = Assembler(
            self._rows, limits.max_num_seqs, limits.max_num_batched_tokens, block_size, self._device, adapters
        )
        self._sampler = Sampler(device)
        self._pages = choose("pages", device)
        self._trees = choose("trees", device)
        self._recorded = RecordedDecodes(model, pool) if limits.record_decodes else None
        self.mover: TransferEngine | None = None  # None: nothing leaves the pool
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-runner")
        self._launched: deque[Future[StepResult]] = deque()
        self._masks: SimpleQueue[TokenMask | None] = SimpleQueue()  # of launched steps that wait for one

    def launch(self, step: Step) -> None:
        fetched = self._adapters.fetch(step) if self._adapters is not None else ()
        self._launched.append(self._worker.submit(self._run, step, fetched))

    def mask(self, mask: TokenMask) -> None:
        """Lets the oldest step that waits for a mask sample."""
        self._masks.put(mask)

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected; waits for it."""
        return self._launched.popleft().result()

    def close(self) -> None:
        self._masks.put(None)  # a mask that was still to come will not
        self._worker.shutdown(wait=True)
        if self.mover is not None:
            self.mover.close()

    @torch.inference_mode()
    def _run(self, step: Step, fetched: tuple[Fetched, ...]) -> StepResult:
        started = time.perf_counter()
        self._rows.apply(step)
        if self.mover is not None:
            self.mover.move(step)
        if self._adapters is not None:
            self._adapters.apply(step, fetched)
        if step.copy_sources:
            sources, targets = self._ids(step.copy_sources), self._ids(step.copy_targets)
            self._pages.copy_blocks(self._pool.data, sources, targets)
        assembled = self._assembler.assemble(step)
        logits, scored = self._forward(assembled)
        mask = self._masks.get() if step.masked else None
        sampled: Sampled | None = None
        drawn: tuple[Ints, ...] = ()
        if len(assembled.sample_rows):
            sampled, drawn = self._sample(logits, assembled, mask, step)
        if step.drafts and sampled is not None:
            self._settle(step, sampled)
        finite = sampled.finite.cpu().numpy() if sampled is not None else np.ones(0, np.bool_)
        return StepResult(
            step_id=step.step_id,
            token_ids=ints(sampled.token_ids.tolist() if sampled is not None else ()),
            logprobs=logprob_entries(sampled) if sampled is not None else (),
            prompt_logprobs=scored,
            failed=() if finite.all() else tuple(int(i) for i in np.flatnonzero(~finite)),
            seconds=time.perf_counter() - started,
            beams=candidate_records(sampled.beams) if sampled is not None else (),
            drawn=drawn,
        )

    def _settle(self, step: Step, sampled: Sampled) -> None:
        verified = verified_trees(step)
        if verified is not None:
            self._trees.settle(
                sampled.token_ids,
                torch.from_numpy(verified.trees),
                torch.from_numpy(verified.nodes),
                self._rows.token_ids,
                torch.from_numpy(self._rows.tables),
                self._pool.data,
                self._pool.layout.block_size,
                2 * self._pool.layout.num_layers,
            )

    def _ids(self, blocks: Ints) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _forward(self, assembled: Assembled) -> tuple[Tensor, tuple[PromptLogprobs, ...]]:
        """Logits of the sampled rows, and logprobs of the prompt tokens that were asked for."""
        batch: Batch = assembled.batch
        recorded = self._recorded
        if batch.lora is not None and not (self._adapters is not None and self._adapters.recordable):
            recorded = None
        if assembled.is_decode and recorded is not None:
            return recorded.logits(batch), ()
        num_samples = len(assembled.sample_rows)
        hidden = self._model(batch, self._pool)
        scored = []
        first = num_samples
        for row in assembled.scored:
            scored.append(self._score(row, hidden[first : first + row.count]))
            first += row.count
        lora = self._of_head(assembled.line_rows[:num_samples])
        return self._model.logits(hidden[:num_samples], lora), tuple(scored)

    def _of_head(self, line_rows: np.ndarray) -> LoraBatch | None:
        return self._adapters.of_head(line_rows) if self._adapters is not None else None

    def _score(self, scored: ScoredRow, hidden: Tensor) -> PromptLogprobs:
        following = self._rows.token_ids[scored.row, scored.first + 1 : scored.first + 1 + scored.count]
        following = following.to(self._device)
        entries = []
        for start in range(0, scored.count, SCORED_PER_PASS):
            lines = hidden[start : start + SCORED_PER_PASS]
            logits = self._model.logits(lines, self._of_head(np.full(len(lines), scored.row)))
            entries += prompt_logprobs(logits, following[start : start + SCORED_PER_PASS], scored.num_top)
        return PromptLogprobs(scored.row, scored.first + 1, tuple(entries))

    def _sample(
        self, logits: Tensor, assembled: Assembled, mask: TokenMask | None, step: Step
    ) -> tuple[Sampled, tuple[Ints, ...]]:
        rows, positions = assembled.sample_rows, assembled.sample_positions
        token_ids_so_far = self._rows.token_ids.to(self._device)  # on the CPU the same memory
        requests = SampleRequests(
            rows, positions, self._rows.settings.columns, token_ids_so_far, mask, beams=step.beams
        )
        sampled, drawn = choose_tokens(self._proposals, self._sampler, logits, requests, step)
        self._rows.tokens[rows, positions] = sampled.token_ids.cpu().numpy()
        return sampled, drawn
