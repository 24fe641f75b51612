"""EngineCore.step: schedule → launch → collect → commit, with zero or one step in flight. Engine: it generates."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from quire.core.config import SchedulerConfig
from quire.core.errors import AdapterError, DeviceMemoryFull, InvalidRequest, QueueFull
from quire.core.request import Clock, FinishReason, Request
from quire.core.sampling import SamplingParams
from quire.core.stats import EngineStats, OffloadStats, PoolStats, QueueStats, SpeculationStats, StepStats
from quire.core.step import SequenceUpdate, Step, StepResult
from quire.engine.adapters import Adapters
from quire.engine.commit import Committer, error_updates, request_errors
from quire.engine.policies import make_admission_policy
from quire.engine.speculation import Speculation
from quire.engine.structured import StructuredOutputs
from quire.engine.validation import Limits, RequestValidator, check_text
from quire.grammar.compiler import Compiler
from quire.memory.paged import PagedMemory
from quire.sampling.columns import SamplingColumns
from quire.sampling.records import TokenMask
from quire.scheduler.plan import ScheduledStep
from quire.scheduler.preemption import Preemption
from quire.scheduler.scheduler import Scheduler

FILLING = 0.4  # share of the pool's blocks in use from which preemptions are prepared for
PIN = "pin"  # the request that computes a pinned prefix
# seconds that an idle engine waits at a time:
DISK_WAIT = 0.002  # for blocks from the disk tier
COMPILING_WAIT = 0.01  # for a grammar


class StepRunner(Protocol):
    """Runs steps in the order of their launch. A step with `masked` samples waits for its mask before it samples.

    `launch` and `mask` raise DeviceMemoryFull if the step does not fit the device: it will have no result.
    """

    def launch(self, step: Step) -> None: ...

    def mask(self, mask: TokenMask) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


W = TypeVar("W", bound=StepRunner)
U = TypeVar("U")  # an update: what a commit tells the caller


class EngineCore(ABC, Generic[U]):
    """One model, one loop. Not thread-safe: one thread adds, aborts and steps.

    Subclasses say what waits, what a step computes and what its result means.
    """

    adapters: Adapters | None = None  # None: they are off

    def __init__(
        self, limits: Limits, runner: Any, steps_in_flight: int, check_ranks: Callable[[], None] | None = None
    ) -> None:
        """`runner` launches and collects the subclass's kind of step, as a StepRunner does."""
        self.limits = limits
        # raises EngineDead if a rank that the steps need is gone
        self.check_ranks = check_ranks or (lambda: None)
        self.stats = StepStats()
        self._runner = runner
        self._in_flight: deque[Any] = deque()  # scheduled steps
        self._max_in_flight = steps_in_flight

    def step(self) -> list[U]:
        """Schedules and launches the next step if there is one, and commits the oldest that must be."""
        updates, scheduled = self._schedule()
        if scheduled is not None:
            updates += self._launch(scheduled)
        if len(self._in_flight) > (self._max_in_flight if scheduled is not None else 0):
            updates += self._commit()
        elif scheduled is None:
            self._when_idle()
        return updates

    @abstractmethod
    def _schedule(self) -> tuple[list[U], Any | None]:
        """What ended meanwhile, and the next step; None if nothing can run now."""

    def _launch(self, scheduled: Any) -> list[U]:
        self._runner.launch(scheduled.step)
        self._in_flight.append(scheduled)
        return []

    def _commit(self) -> list[U]:
        """Collects and commits the oldest step in flight."""
        scheduled = self._in_flight.popleft()
        result = self._runner.collect()
        started = time.perf_counter()
        updates = self._committed(scheduled, result)
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += scheduled.num_tokens
        self.stats.step_seconds += result.seconds
        self.stats.commit_seconds += time.perf_counter() - started
        return updates

    @abstractmethod
    def _committed(self, scheduled: Any, result: Any) -> list[U]: ...

    def _when_idle(self) -> None:
        """Nothing can run now."""

    @abstractmethod
    def add(self, request: Any) -> None:
        """Queues a request. Raises InvalidRequest if it can never run, QueueFull if not now."""

    @abstractmethod
    def abort(self, request_id: str) -> bool:
        """Ends a request now. False if there is no such request."""

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one sequence of a request as stopped: its caller saw a stop string in its text."""
        return False

    @property
    @abstractmethod
    def has_requests(self) -> bool:
        """Whether there are requests, and not only adapters being loaded."""

    @property
    def has_work(self) -> bool:
        return self.has_requests or (self.adapters is not None and self.adapters.are_loading)

    @abstractmethod
    def queue_stats(self) -> QueueStats:
        """The load now, cheap enough for every step."""

    @abstractmethod
    def started(self, updates: Iterable[U]) -> set[str]:
        """Requests that have left the queue: running ones, and ones that began and ended in the last step."""

    def snapshot(self) -> EngineStats:
        """All statistics. Counters are the live records of their rooms: encode or copy them before the next step."""
        return EngineStats(self.stats)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes except pinned ones; running requests go on."""

    def check_integrity(self) -> None:
        """Recounts the pool. RuntimeError says what is wrong."""

    def close(self) -> None:
        """Waits for the steps in flight and drops their results. Calling it twice is fine."""
        self._in_flight.clear()
        self._runner.close()


class Engine(EngineCore[SequenceUpdate]):
    """An engine that generates: one pool, sequences that advance token by token."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: Limits,
        memory: PagedMemory,
        runner: StepRunner,
        seed: int = 0,
        make_compiler: Callable[[], Compiler] | None = None,
        make_speculation: Callable[[StructuredOutputs], Speculation] | None = None,
        preemption: Preemption | None = None,
        clock: Clock = time.monotonic,
        adapters: Adapters | None = None,
        when_filling: Callable[[], None] | None = None,
        in_new_thread: Callable[[], None] | None = None,
        check_ranks: Callable[[], None] | None = None,
    ):
        """`when_filling` is called once, when the pool is FILLING for the first time. `in_new_thread` must be called by
        a thread that steps the engine and did not build it. `adapters`: None if they are off.
        """
        super().__init__(limits, runner, config.steps_in_flight, check_ranks)
        self.clock = clock  # of arrivals; a simulated device has its own
        self.memory = memory
        self.in_new_thread = in_new_thread
        self._when_filling = when_filling
        self._structured = StructuredOutputs(make_compiler, limits)
        self.speculation = make_speculation(self._structured) if make_speculation is not None else None
        self.adapters = adapters
        self.scheduler = Scheduler(
            config,
            memory,
            self.speculation,
            preemption,
            adapters.admission if adapters is not None else None,
            make_admission_policy(config, clock),
        )
        self._validator = RequestValidator(limits, memory, seed, clock)
        self._trial_row = SamplingColumns(1, limits.vocab_size)
        self._compiled: list[Request] = []  # whose grammar is compiled and which the queue has not taken yet
        self._committer = Committer(self.scheduler, self._structured, self.speculation)

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest if it can never run, QueueFull if not now.

        A grammar that is not compiled yet delays the request; `step` reports one that cannot be compiled.
        """
        request_id = request.request_id
        if self._has_request(request_id):
            raise InvalidRequest(
                f"request id {request_id!r} is already being served: use another", "request_id"
            )
        if request.adapter is not None:  # the name's meaning is fixed now
            request = replace(request, adapter=self._arrive(request_id, request.adapter))
        try:
            request = self._validator.accept(request)
            self._check_computable(request)
            if request.sampling.structured is None or self._structured.admit(request):
                self.scheduler.add(request)
        except BaseException:
            self._give_back_adapter(request_id)
            raise
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += request.num_encoder_tokens or request.num_prompt_tokens

    def _check_computable(self, request: Request) -> None:
        """Computes what steps derive from the values, so that a value that fails ends this request alone."""
        try:
            self.memory.index.root(request.cache_salt)
            self._trial_row.start_row(
                0, request.sampling, request.seed, 0, request.num_prompt_tokens, request.stop_token_ids
            )
        except Exception as fault:
            raise InvalidRequest(
                f"the request cannot be computed: {type(fault).__name__}: {fault}"
            ) from fault

    def _arrive(self, request_id: str, adapter: str) -> str:
        check_text("adapter", adapter)
        if self.adapters is None:
            raise AdapterError(
                f"adapter {adapter!r} was asked for and adapters are off: start with enable_lora, lora_modules "
                "or lora_dir"
            )
        return self.adapters.arrive(request_id, adapter)

    def _give_back_adapter(self, request_id: str) -> None:
        if self.adapters is not None:
            self.adapters.end(request_id)

    def pin(self, token_ids: Sequence[int]) -> int:
        """Computes a prefix and pins its full blocks; returns how many. Only while nothing else runs.

        Raises InvalidRequest if it can never run. Stats do not count it.
        """
        counted = replace(self.stats), replace(self.memory.stats)
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        request = self._validator.accept(Request(PIN, token_ids, sampling))
        self.scheduler.add(request)
        while self.has_work:
            self.step()
        self.stats, self.memory.stats = counted
        return self.memory.pin(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its blocks are free when this returns. False if there is no such request."""
        known = self._has_request(request_id)
        self._compiled = [request for request in self._compiled if request.request_id != request_id]
        self.scheduler.abort(request_id, FinishReason.ABORT)
        self._forget_if_ended(request_id)
        return known

    def stop(self, request_id: str, index: int) -> bool:
        stopped = self.scheduler.stop(request_id, index)
        self.stats.num_finished += stopped  # no update follows
        self._forget_if_ended(request_id)
        return stopped

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight or self.num_compiling)

    @property
    def num_compiling(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._structured.compiling) + len(self._compiled)

    def queue_stats(self) -> QueueStats:
        scheduler = self.scheduler
        return QueueStats(len(scheduler.running), len(scheduler.waiting) + self.num_compiling)

    def started(self, updates: Iterable[SequenceUpdate]) -> set[str]:
        running = {sequence.request.request_id for sequence in self.scheduler.running}
        return running.union(update.request_id for update in updates)

    def snapshot(self) -> EngineStats:
        memory = self.memory
        num_used, offload = memory.num_blocks - memory.num_free, memory.offload_cache
        pool = PoolStats(
            num_blocks_used=num_used,
            usage=num_used / max(1, memory.num_blocks),
            swap_used=memory.swap.hosts.num_used,
            swap_space=memory.swap.hosts.num_blocks,
            offload_used=0 if offload is None else offload.num_used,
            offload_space=0 if offload is None else offload.num_hosts,
            offload_disk=0 if offload is None else offload.num_disk_blocks,
        )
        return EngineStats(
            steps=self.stats,
            scheduler=self.scheduler.stats,
            memory=memory.stats,
            pool=pool,
            swap=memory.swap.stats,
            offload=OffloadStats() if offload is None else offload.stats,
            speculation=self.draft_stats,
            adapters=None if self.adapters is None else self.adapters.stats(),
        )

    def reset_prefix_cache(self) -> None:
        self.memory.reset_prefix_index()

    @property
    def draft_stats(self) -> SpeculationStats:
        """All zero if speculation is off."""
        return SpeculationStats() if self.speculation is None else self.speculation.stats

    def _schedule(self) -> tuple[list[SequenceUpdate], ScheduledStep | None]:
        updates = self._take_compiled() if self.num_compiling else []
        if self.adapters is not None:
            self.adapters.finish_loads()  # before a step relies on host copies: new ones may evict others
        if self._when_filling is not None and self.memory.usage > FILLING:
            self._when_filling()
            self._when_filling = None
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        self.stats.schedule_seconds += time.perf_counter() - started
        if self.adapters is not None:
            updates += self._fail_adapters(self.adapters)
        return updates, scheduled

    def _launch(self, scheduled: ScheduledStep) -> list[SequenceUpdate]:
        try:
            updates = super()._launch(scheduled)
        except DeviceMemoryFull as full:
            updates = self._shed(scheduled, str(full))
            while self._in_flight:  # requests sent back need their last token before they start again
                updates += self._commit()
            return updates
        if scheduled.step.masked:
            while len(self._in_flight) > 1:  # the mask depends on the tokens of the step before
                updates += self._commit()
            updates += self._mask(scheduled)
        return updates

    def _when_idle(self) -> None:
        """Nothing can run now: waits a moment for an adapter, a block from disk, or a batch to be complete."""
        if self.adapters is not None:
            self.adapters.wait()
        if self.memory.offload_cache is not None:
            self.memory.offload_cache.wait(DISK_WAIT)
        self.scheduler.policy.wait(self.scheduler.waiting)

    def watch(self, watcher: Callable[[StepRunner], W]) -> W:
        """For measurements: puts a wrapper between the engine and its runner, and returns it."""
        watching = watcher(self._runner)
        self._runner = watching
        return watching

    def check_integrity(self) -> None:
        self.memory.check_integrity(self.scheduler.sequences())

    def close(self) -> None:
        super().close()
        if self.speculation is not None:
            self.speculation.close()
        if self.adapters is not None:
            self.adapters.close()
        self._structured.close()

    def _fail_adapters(self, adapters: Adapters) -> list[SequenceUpdate]:
        """Ends the requests of adapters that cannot be loaded."""
        updates: list[SequenceUpdate] = []
        for group, error in adapters.admission.take_failed():
            for update in self._committer.fail(group.live[0], str(error)):
                update.param = error.param
                updates.append(update)
        self._count_ends(updates)
        return updates

    def _shed(self, scheduled: ScheduledStep, why: str) -> list[SequenceUpdate]:
        """Ends the newest request of a step that did not fit the device; the others go on with smaller steps."""
        ended = self.scheduler.shed(scheduled)
        for sequence in ended:
            self._forget_if_ended(sequence.request.request_id)
        updates = error_updates(ended, f"request {ended[0].request.request_id}: {why}") if ended else []
        self.stats.num_finished += len(updates)
        return updates

    def _has_request(self, request_id: str) -> bool:
        return (
            self.scheduler.has_request(request_id)
            or request_id in self._structured.compiling
            or any(request.request_id == request_id for request in self._compiled)
        )

    def _take_compiled(self) -> list[SequenceUpdate]:
        """Requests whose grammar is compiled enter the queue, or fail."""
        idle = not (self.scheduler.has_work or self._in_flight or self._compiled)
        arrivals = self._structured.arrivals(COMPILING_WAIT if idle else 0.0)
        self._compiled += arrivals.ready
        while self._compiled:
            try:
                self.scheduler.add(self._compiled[0])
            except QueueFull:
                break  # it was accepted on arrival: it waits here for room in the queue
            del self._compiled[0]
        updates: list[SequenceUpdate] = []
        for request, fault in arrivals.failed:
            self._give_back_adapter(request.request_id)
            param = fault.param if isinstance(fault, InvalidRequest) else None
            updates += request_errors(request, str(fault), param)
        self.stats.num_finished += len(updates)
        return updates

    def _mask(self, scheduled: ScheduledStep) -> list[SequenceUpdate]:
        """Masks the step just launched, all before it being committed. Its forward pass runs meanwhile."""
        started = time.perf_counter()
        mask, failed = self._structured.mask(scheduled)
        unfit = ""
        try:
            self._runner.mask(mask)
        except DeviceMemoryFull as full:
            unfit = str(full)
        self.stats.mask_seconds += time.perf_counter() - started
        updates = [
            update for sequence, error in failed for update in self._committer.fail(sequence, str(error))
        ]
        self._count_ends(updates)
        if unfit:
            self._in_flight.pop()  # the only one, and nothing of it counts
            updates += self._shed(scheduled, unfit)
        return updates

    def _forget_if_ended(self, request_id: str) -> None:
        if not self.scheduler.has_request(request_id):
            self._committer.forget(request_id)
            if self._structured.running or self._structured.compiling:
                self._structured.forget(request_id)
            self._give_back_adapter(request_id)
            if self.speculation is not None:
                self.speculation.forget(request_id)

    def _count_ends(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                self.stats.num_finished += 1
                self._forget_if_ended(update.request_id)

    def _committed(self, scheduled: ScheduledStep, result: StepResult) -> list[SequenceUpdate]:
        if result.step_id != scheduled.step.step_id:
            raise RuntimeError(
                f"the runner returned step {result.step_id} where step {scheduled.step.step_id} was due: a step was "
                "launched and lost, perhaps by an interrupt. Build a new engine"
            )
        updates = self._committer.commit(scheduled, result)
        self.stats.num_generated_tokens += sum([len(update.token_ids) for update in updates])
        self._count_ends(updates)
        self.scheduler.measured(scheduled.step, result.seconds)
        return updates
