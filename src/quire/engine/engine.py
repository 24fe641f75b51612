"""Engine.step: schedule → launch → collect → commit, with zero or one step in flight."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from quire.core.clock import Clock, VirtualClock
from quire.core.config import SchedulerConfig
from quire.core.errors import AdapterError, DeviceMemoryFull, InvalidRequest, QueueFull
from quire.core.request import FinishReason, Request
from quire.core.sampling import SamplingParams
from quire.core.stats import EngineStats, OffloadStats, PoolStats, QueueStats, SpeculationStats, StepStats
from quire.core.step import SequenceUpdate, Step, StepResult
from quire.engine.adapters import Adapters
from quire.engine.commit import Committer, error_updates
from quire.engine.speculation import Speculation
from quire.engine.structured import StructuredOutputs
from quire.engine.validation import Limits, RequestValidator
from quire.grammar.compiler import Compiler
from quire.memory.interface import Memory
from quire.sampling.records import TokenMask
from quire.scheduler.planned import ScheduledStep
from quire.scheduler.preemption import Preemption
from quire.scheduler.scheduler import Scheduler

FILLING = 0.4  # of the pool's blocks are taken: requests may have to leave it before long
READING_WAIT = 0.002  # seconds that it waits for blocks from the disk at a time
PIN = "pin"  # the request that computes a pinned prefix
COMPILING_WAIT = 0.01  # seconds that an engine with nothing else to do waits for a grammar at a time
COMPANY_WAIT = 0.001  # the same, for a batch to be full


class StepRunner(Protocol):
    """Runs steps in the order of their launch. One with `masked` samples waits for its mask before it samples.

    `launch` and `mask` raise DeviceMemoryFull where the step does not fit: no result of it will come.
    """

    def launch(self, step: Step) -> None: ...

    def mask(self, mask: TokenMask) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


W = TypeVar("W", bound=StepRunner)


class Engine:
    """One model, one pool, one loop. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: Limits,
        memory: Memory,
        runner: StepRunner,
        seed: int = 0,
        make_compiler: Callable[[], Compiler] | None = None,
        make_speculation: Callable[[StructuredOutputs], Speculation] | None = None,
        preemption: Preemption | None = None,
        clock: Clock = time.monotonic,
        adapters: Adapters | None = None,
    ):
        self.limits = limits
        self.clock = clock  # of arrivals; a simulated device has its own
        self.memory = memory
        self._structured = StructuredOutputs(make_compiler, limits)
        self.speculation = make_speculation(self._structured) if make_speculation is not None else None
        self.adapters = adapters  # None: they are off
        line = adapters.line if adapters is not None else None
        self.scheduler = Scheduler(config, memory, self.speculation, preemption, clock, line)
        self.stats = StepStats()
        self._validator = RequestValidator(limits, memory, seed, clock)
        self._runner: StepRunner = runner
        self._compiled: list[Request] = []  # whose grammar is done and whom the queue has not taken yet
        self._committer = Committer(self.scheduler, self._structured, self.speculation)
        self._in_flight: deque[ScheduledStep] = deque()
        self._max_in_flight = config.steps_in_flight
        self.in_new_thread: Callable[[], None] | None = (
            None  # for a thread that will step and did not build it
        )
        self.when_filling: Callable[[], None] | None = (
            None  # called once, when the pool is FILLING for the first time
        )

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
            if request.sampling.structured is None or self._structured.admit(request):
                self.scheduler.add(request)
        except BaseException:
            self._give_back_adapter(request_id)
            raise
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += request.num_prompt_tokens

    def _arrive(self, request_id: str, adapter: str) -> str:
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
        """Computes a prefix and holds its full blocks for good; how many. Only while nothing else runs.

        Raises InvalidRequest if it can never run. Statistics do not count it: no client asked for it.
        """
        counted = replace(self.stats), replace(self.memory.stats)
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        request = self._validator.accept(Request(PIN, token_ids, sampling))
        self.scheduler.add(request)
        while self.has_work:
            self.step()
        self.stats, self.memory.stats = counted
        return self.memory.hold(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its blocks are free when this returns. False if nobody knows it."""
        known = self._has_request(request_id)
        self._compiled = [request for request in self._compiled if request.request_id != request_id]
        self.scheduler.abort(request_id, FinishReason.ABORT)
        self._committer.forget(request_id)
        self._forget_if_ended(request_id)
        return known

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one sequence of a request as stopped: its caller saw a stop string in its text."""
        stopped = self.scheduler.stop(request_id, index)
        self._forget_if_ended(request_id)
        return stopped

    @property
    def has_work(self) -> bool:
        return self.has_requests or (self.adapters is not None and self.adapters.are_loading)

    @property
    def has_requests(self) -> bool:
        """Whether someone waits for an answer, and not only for an adapter to be loaded."""
        return self.scheduler.has_work or bool(self._in_flight or self.num_compiling)

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return self._structured.num_compiling + len(self._compiled)

    def queue_stats(self) -> QueueStats:
        """The load now, cheap enough for every step."""
        scheduler = self.scheduler
        return QueueStats(len(scheduler.running), len(scheduler.waiting) + self.num_compiling)

    def started(self, updates: Iterable[SequenceUpdate]) -> set[str]:
        """Requests that have left the queue: those that run, and those that began and ended in the last step."""
        running = {sequence.request.request_id for sequence in self.scheduler.running}
        return running.union(update.request_id for update in updates)

    def snapshot(self) -> EngineStats:
        """All statistics. Counters are the live records of their rooms: encode or copy them before the next step."""
        memory = self.memory
        num_used, offload = memory.num_blocks - memory.num_free, memory.home
        pool = PoolStats(
            num_blocks_used=num_used,
            usage=num_used / max(1, memory.num_blocks),
            swap_used=memory.swap.num_used,
            swap_space=memory.swap.hosts.num_blocks,
            offload_used=0 if offload is None else offload.num_used,
            offload_space=0 if offload is None else offload.num_hosts,
            offload_disk=0 if offload is None else offload.num_shelved,
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
        """Forgets all cached prefixes but those that are pinned; running requests go on."""
        self.memory.reset_prefix_index()

    @property
    def draft_stats(self) -> SpeculationStats:
        """All zero without speculation."""
        return SpeculationStats() if self.speculation is None else self.speculation.stats

    def step(self) -> list[SequenceUpdate]:
        """Launches the next step if there is one and commits the oldest that must be."""
        updates = self._take_compiled() if self.num_compiling else []
        if self.adapters is not None:
            self.adapters.finish_loads()  # before a step counts on host copies: those that come may push others out
        if self.when_filling is not None and self.memory.usage > FILLING:
            self.when_filling()
            self.when_filling = None
        started = time.perf_counter()
        planned = self.scheduler.schedule()
        self.stats.schedule_seconds += time.perf_counter() - started
        if self.adapters is not None:
            updates += self._fail_adapters(self.adapters)
            if planned is None and not self._in_flight:
                self.adapters.wait()
        if planned is not None:
            try:
                self._runner.launch(planned.step)
            except DeviceMemoryFull as full:
                updates += self._shed(planned, str(full))
                while self._in_flight:  # those sent back must know their last token before they start again
                    updates += self._commit(self._in_flight.popleft())
                return updates
            self._in_flight.append(planned)
        unmasked = planned if planned is not None and planned.step.masked else None
        if unmasked is not None and unmasked is self._in_flight[0]:
            updates += self._mask(unmasked)
            unmasked = None
        if len(self._in_flight) > self._max_in_flight or (planned is None and self._in_flight):
            updates += self._commit(self._in_flight.popleft())
        elif planned is None and self.memory.home is not None:
            self.memory.home.wait(READING_WAIT)
        if unmasked is not None:  # what it may sample depends on the tokens that were committed just now
            updates += self._mask(unmasked)
        if planned is None and not self._in_flight and not updates:
            self._wait_for_company()
        return updates

    def watch(self, watcher: Callable[[StepRunner], W]) -> W:
        """For measurements: puts something between the engine and its runner that sees every step, and returns it."""
        watching = watcher(self._runner)
        self._runner = watching
        return watching

    def check_integrity(self) -> None:
        self.memory.check_integrity(self.scheduler.sequences())

    def close(self) -> None:
        """Waits for the steps in flight, whose results nobody wants any more. Calling it twice is fine."""
        self._in_flight.clear()
        self._runner.close()
        if self.speculation is not None:
            self.speculation.close()
        if self.adapters is not None:
            self.adapters.close()
        self._structured.close()

    def _fail_adapters(self, adapters: Adapters) -> list[SequenceUpdate]:
        """An adapter that cannot be loaded fails those who asked for it, and nobody else."""
        updates: list[SequenceUpdate] = []
        for group, error in adapters.line.take_failed():
            for update in self._committer.fail(group.live[0], str(error)):
                update.param = error.param
                updates.append(update)
        self._count_ends(updates)
        return updates

    def _shed(self, planned: ScheduledStep, why: str) -> list[SequenceUpdate]:
        """The newest request pays for a step that did not fit; the others go on with smaller steps."""
        ended = self.scheduler.shed(planned)
        for sequence in ended:
            self._forget_if_ended(sequence.request.request_id)
            self._committer.forget(sequence.request.request_id)
        updates = error_updates(ended, f"request {ended[0].request.request_id}: {why}") if ended else []
        self.stats.num_finished += len(updates)
        return updates

    def _wait_for_company(self) -> None:
        """Where those who wait are not a batch yet, a moment passes instead of nothing, again and again."""
        starts_at = self.scheduler.starts_at
        if starts_at is None:
            return
        now = self.clock()
        if isinstance(self.clock, VirtualClock):
            self.clock.advance_to(min(starts_at, now + COMPANY_WAIT))
        else:
            time.sleep(min(COMPANY_WAIT, max(0.0, starts_at - now)))

    def _has_request(self, request_id: str) -> bool:
        return (
            self.scheduler.has_request(request_id)
            or self._structured.has_request(request_id)
            or any(request.request_id == request_id for request in self._compiled)
        )

    def _take_compiled(self) -> list[SequenceUpdate]:
        """Requests whose grammar is done enter the queue, or fail."""
        idle = not (self.scheduler.has_work or self._in_flight or self._compiled)
        arrivals = self._structured.arrivals(COMPILING_WAIT if idle else 0.0)
        self._compiled += arrivals.ready
        while self._compiled:
            try:
                self.scheduler.add(self._compiled[0])
            except QueueFull:
                break  # it has been taken in already: it waits here for its place
            del self._compiled[0]
        for request, _ in arrivals.failed:
            self._give_back_adapter(request.request_id)
        self.stats.num_finished += sum(request.sampling.num_answers for request, _ in arrivals.failed)
        return [
            SequenceUpdate(
                request.request_id,
                index,
                (),
                finish_reason=FinishReason.ERROR,
                error=str(fault),
                param=fault.param if isinstance(fault, InvalidRequest) else None,
            )
            for request, fault in arrivals.failed
            for index in range(request.sampling.num_answers)
        ]

    def _mask(self, planned: ScheduledStep) -> list[SequenceUpdate]:
        """Masks the step just launched, all before it being committed. Its forward pass runs meanwhile."""
        started = time.perf_counter()
        mask, failed = self._structured.mask(planned)
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
            updates += self._shed(planned, unfit)
        return updates

    def _forget_if_ended(self, request_id: str) -> None:
        if not self.scheduler.has_request(request_id):
            self._structured.forget(request_id)
            self._give_back_adapter(request_id)
            if self.speculation is not None:
                self.speculation.forget(request_id)

    def _count_ends(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                self.stats.num_finished += 1
                self._committer.forget(update.request_id)
                self._forget_if_ended(update.request_id)

    def _commit(self, planned: ScheduledStep) -> list[SequenceUpdate]:
        result = self._runner.collect()
        started = time.perf_counter()
        updates = self._committer.commit(planned, result)
        for update in updates:
            self.stats.num_generated_tokens += len(update.token_ids)
        self._count_ends(updates)
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += planned.step.total_tokens
        self.stats.step_seconds += result.seconds
        self.scheduler.preemption.speed.note(planned.step.total_tokens, result.seconds)
        self.stats.commit_seconds += time.perf_counter() - started
        return updates
