"""Runner: executes Steps on one device, in order. `launch` and `collect` are two calls."""

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import DeviceMemoryFull
from quire.core.request import Ints, ints
from quire.core.step import Step, StepResult
from quire.kernels import choose
from quire.layers.attention import Pool
from quire.layers.lora import MANY_FROM
from quire.models.model import DecoderModel
from quire.runner.adapters import AdapterSlots, Fetched
from quire.runner.cpu import CpuOps
from quire.runner.cuda import CudaOps
from quire.runner.device_ops import DeviceOps, ForwardPass, HostSamples, RunnerLimits, Submitted
from quire.runner.drafts import Proposals, choose_tokens, verified_trees
from quire.runner.staging import Sections, send
from quire.runner.transfer import TransferEngine
from quire.runner.warmup import PROMPT_TOKENS, warmup_steps
from quire.sampling.beams import candidate_records
from quire.sampling.logprobs import logprob_entries
from quire.sampling.records import Sampled, TokenMask
from quire.sampling.sampler import Sampler

MakeOps = Callable[[DecoderModel, Pool, RunnerLimits, torch.device, AdapterSlots | None], DeviceOps]


@dataclass(slots=True)
class _Launched:
    """A step on its way: its pass, then its samples."""

    forward: ForwardPass
    started: float
    samples: HostSamples | None = None  # None: it waits for its mask
    drawn: tuple[Ints, ...] = ()  # tokens of a draft


class PendingWork:
    """What must be done before a pass, in order. Work that raised is done again before anything added later."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()

    def add(self, work: Callable[[], None]) -> None:
        """`work` may be called again after it raised halfway."""
        self._work.append(work)

    def do(self) -> None:
        """All of it, or up to the first that raises."""
        while self._work:
            self._work[0]()
            self._work.popleft()


class Runner:
    """The order of a step: rows change, blocks and adapters move, pages are copied, forward, sampling, result.

    On a CPU a worker thread does all of that. On a GPU it is queued on one stream, and nothing waits but `collect`.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: Pool,
        limits: RunnerLimits,
        device: torch.device | str = "cpu",
        proposals: Proposals | None = None,  # None: no draft is judged by its probabilities
        adapters: AdapterSlots | None = None,
        transfers: TransferEngine | None = None,  # None: nothing leaves the pool
        make_ops: MakeOps | None = None,  # None: as the device has it
    ) -> None:
        self._device = torch.device(device)
        if make_ops is None:
            make_ops = CudaOps if self._device.type == "cuda" else CpuOps
        self._ops = make_ops(model, pool, limits, self._device, adapters)
        self._pool = pool
        self._limits = limits
        self._proposals = proposals
        self._adapters = adapters
        self._transfers = transfers
        self._sampler = Sampler(self._device)
        self._pages = choose("pages", self._device)
        self._trees = choose("trees", self._device)
        self._pending = PendingWork()
        self._launched: deque[Submitted[_Launched]] = deque()
        self._last_arrival = 0.0

    @property
    def tiles(self) -> str:
        """Attention's, on a GPU: tuned, default or fixed."""
        return self._ops.tiles

    # ------------------------------------------------------------------ the three calls

    def launch(self, step: Step) -> None:
        """Starts the forward pass, and sampling unless it waits for a mask. Raises DeviceMemoryFull.

        Then no result of the step will come. What a step does before its pass is kept and done with the next, since
        others count on it: rows that start without advancing, blocks that leave, adapters of later steps.
        """
        # Adapters' host copies are held for no longer than this call.
        fetched = self._adapters.fetch(step) if self._adapters is not None else ()
        self._launched.append(self._ops.submit(partial(self._start, step, fetched)))

    def mask(self, mask: TokenMask) -> None:
        """Samples the step that was launched last, which waited for this. Raises DeviceMemoryFull, as `launch` does."""
        launched = self._launched.pop()
        self._launched.append(self._ops.submit(partial(self._resume, launched, mask)))

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected; waits for it."""
        launched = self._launched.popleft().result()
        samples, forward = launched.samples, launched.forward
        if samples is None:
            raise RuntimeError("a step that waits for its mask was collected before it had one")
        sampled, ended = samples.sampled, samples.ended
        if samples.arrived is not None:
            samples.arrived.synchronize()
        if not ended:
            ended = time.perf_counter()
        finite = samples.finite.numpy()
        seconds = ended - max(launched.started, self._last_arrival)
        self._last_arrival = ended
        return StepResult(
            step_id=forward.inputs.step.step_id,
            token_ids=ints(samples.token_ids.tolist()),
            logprobs=logprob_entries(sampled) if sampled is not None and sampled.logprobs is not None else (),
            prompt_logprobs=forward.scores,
            failed=() if finite.all() else tuple(np.flatnonzero(~finite).tolist()),
            seconds=seconds,
            beams=candidate_records(samples.beams) if samples.beams else (),
            drawn=launched.drawn,
        )

    def close(self) -> None:
        self._launched.clear()
        self._ops.close()
        if self._transfers is not None:
            self._transfers.close()

    # ------------------------------------------------------------------ one step

    @torch.inference_mode()
    def _start(self, step: Step, fetched: tuple[Fetched, ...]) -> _Launched:
        started = time.perf_counter()
        self._add_pending(step, fetched)
        with _full_memory_gives_up(step):
            self._pending.do()
            launched = _Launched(self._ops.forward(step), started)
            if not step.masked:
                self._sample(launched, None)
        return launched

    @torch.inference_mode()
    def _resume(self, submitted: Submitted[_Launched], mask: TokenMask | None) -> _Launched:
        launched = submitted.result()
        with _full_memory_gives_up(launched.forward.inputs.step):
            self._sample(launched, mask)
        return launched

    def _add_pending(self, step: Step, fetched: tuple[Fetched, ...]) -> None:
        """Each piece may be done again where it came halfway only."""
        add = self._pending.add
        if step.starts or step.forced_rows or step.table_rows or step.drafts:
            add(lambda: self._ops.change_rows(step))
        transfers = self._transfers
        # on a GPU, passes may have to wait for copies of earlier steps
        if transfers is not None and (step.moves is not None or transfers.stream is not None):
            add(lambda: transfers.move(step))
        if (adapters := self._adapters) is not None:
            add(lambda: adapters.apply(step, fetched))
        if step.copy_sources:
            add(lambda: self._copy_pages(step))

    def _copy_pages(self, step: Step) -> None:
        copies = send(np.array([step.copy_sources, step.copy_targets], np.int32), self._device)
        self._pages.copy_blocks(self._pool.data, *copies.long().unbind(0))

    def _sample(self, launched: _Launched, mask: TokenMask | None) -> None:
        forward, sampled = launched.forward, None
        if forward.logits is not None:
            sampled = self._choose(launched, forward.logits, mask)
            if forward.inputs.step.drafts:
                self._accept_trees(forward.inputs.step, sampled)
            forward.logits = None
        launched.samples = self._ops.to_host(sampled, len(forward.inputs.sample_rows))

    def _choose(self, launched: _Launched, logits: Tensor, mask: TokenMask | None) -> Sampled:
        """The step's tokens, which are the rows' own from here on."""
        forward = launched.forward
        step, requests = forward.inputs.step, self._ops.sample_requests(forward, mask)
        if self._proposals is not None and (step.drawn or step.drafts):
            sampled, launched.drawn = choose_tokens(self._proposals, self._sampler, logits, requests, step)
        else:
            sampled = self._sampler(logits, requests)
        if not self._sampler.writes_tokens:
            self._ops.write_tokens(forward, sampled)
        return sampled

    def _accept_trees(self, step: Step, sampled: Sampled) -> None:
        """Rows and pages go on with what was accepted of their trees."""
        verified = verified_trees(step)
        if verified is None:
            return
        sections = Sections([verified.trees.reshape(-1), verified.nodes.reshape(-1)])
        trees, nodes = sections.split(send(sections.packed, self._device))
        for row_tables in self._ops.row_tables.unbind(0):
            self._trees.settle(
                sampled.token_ids,
                trees.view(verified.trees.shape),
                nodes.view(verified.nodes.shape),
                self._ops.row_tokens,
                row_tables,
                self._pool.slots(),
            )

    # ------------------------------------------------------------------ before requests come

    def warm_up(self, seconds: float) -> int:
        """Runs a step of each kind, so that nothing compiles under a request, then captures graphs for `seconds`.

        Returns how many were captured; the others follow when they are needed. Only block 0 is written.
        """
        if not self._ops.compiles:
            return 0
        self.prepare_thread()
        with self._ops.eager():
            self._run_warmup_steps()
            if self._adapters is not None and self._adapters.kinds:
                with self._adapters.pretending():
                    self._run_warmup_steps()
                    for prompt in (MANY_FROM, 4 * MANY_FROM):  # segments are longer there, and cut otherwise
                        self._run_warmup_steps(prompt)
        with torch.inference_mode():
            return self._ops.capture(seconds)

    def _run_warmup_steps(self, prompt: int = PROMPT_TOKENS) -> None:
        for step in warmup_steps(self._limits, self._pool.layout, prompt):
            self.launch(step)
            self.collect()

    def prepare_thread(self) -> None:
        """To be called by a thread that will launch steps and did not build the runner."""
        self._ops.prepare_thread()


@contextmanager
def _full_memory_gives_up(step: Step) -> Iterator[None]:
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
