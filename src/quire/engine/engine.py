"""Engine.step: schedule → launch → collect → commit, with zero or one step in flight."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.config import SchedulerConfig
from quire.core.errors import InvalidRequest
from quire.core.request import FinishReason
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate, Step, StepResult
from quire.engine.arrival import Door, Limits
from quire.engine.commit import Committer
from quire.memory.paged import PagedMemory
from quire.scheduler.scheduler import Planned, Scheduler


class StepRunner(Protocol):
    """Runs steps in the order of their launch."""

    def launch(self, step: Step) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class EngineStats:
    """Plain counters, read by upper rooms."""

    num_requests: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_steps: int = 0
    schedule_seconds: float = 0.0  # deciding steps
    commit_seconds: float = 0.0  # turning results into updates
    step_seconds: float = 0.0  # forward passes and sampling, as the runner saw them


class Engine:
    """One model, one pool, one loop. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self, config: SchedulerConfig, limits: Limits, memory: PagedMemory, runner: StepRunner, seed: int = 0
    ):
        self.limits = limits
        self.memory = memory
        self.scheduler = Scheduler(config, memory)
        self.stats = EngineStats()
        self._door = Door(limits, memory, seed)
        self._runner = runner
        self._committer = Committer(self.scheduler)
        self._in_flight: deque[Planned] = deque()
        self._max_in_flight = config.steps_in_flight

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queues a request. Raises InvalidRequest if it can never run, QueueFull if not now."""
        if self.scheduler.has_request(request_id):
            raise InvalidRequest(
                f"request id {request_id!r} is already being served: use another", "request_id"
            )
        request = self._door.admit(
            request_id, prompt_token_ids, sampling, priority=priority, cache_salt=cache_salt
        )
        self.scheduler.add(request)
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += request.num_prompt_tokens

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its blocks are free when this returns. False if nobody knows it."""
        ended = self.scheduler.abort(request_id, FinishReason.ABORT)
        self._committer.forget(request_id)
        return bool(ended)

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one sequence of a request as stopped: its caller saw a stop string in its text."""
        return self.scheduler.stop(request_id, index)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[SequenceUpdate]:
        """Launches the next step if there is one and commits the oldest that must be."""
        started = time.perf_counter()
        planned = self.scheduler.schedule()
        self.stats.schedule_seconds += time.perf_counter() - started
        if planned is not None:
            self._runner.launch(planned.step)
            self._in_flight.append(planned)
        if len(self._in_flight) > self._max_in_flight or (planned is None and self._in_flight):
            return self._commit(self._in_flight.popleft())
        return []

    def check_integrity(self) -> None:
        self.memory.check_integrity(self.scheduler.sequences())

    def close(self) -> None:
        """Waits for the steps in flight, whose results nobody wants any more. Calling it twice is fine."""
        self._in_flight.clear()
        self._runner.close()

    def _commit(self, planned: Planned) -> list[SequenceUpdate]:
        result = self._runner.collect()
        started = time.perf_counter()
        updates = self._committer.commit(planned, result)
        for update in updates:
            self.stats.num_generated_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                self.stats.num_finished += 1
                self._committer.forget(update.request_id)
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += planned.step.total_tokens
        self.stats.step_seconds += result.seconds
        self.stats.commit_seconds += time.perf_counter() - started
        return updates
