"""The loop serves commands between steps, publishes what changed, and ends as it is told."""

from collections import deque
from collections.abc import Callable, Iterable

import pytest

from quire.core.errors import EngineDead, InvalidRequest
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.stats import EngineStats, QueueStats, StepStats
from quire.core.step import SequenceUpdate
from quire.engine import loop as loops
from quire.engine.loop import Command, EngineLoop, ShutdownSignal, StepReport


class Engine:
    """Generates `num_tokens` tokens for each request, one request at a time; request "bad" is refused."""

    def __init__(self, num_tokens: int = 3) -> None:
        self.queue: list[str] = []
        self.stats = StepStats()
        self.num_checks = 0
        self.dead = False  # a rank of it is gone
        self.stopped: list[tuple[str, int]] = []
        self._num_tokens = num_tokens
        self._left = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.queue)

    has_work = has_requests

    def add(self, request: Request) -> None:
        if request.request_id == "bad":
            raise InvalidRequest("never", "prompt")
        self.queue.append(request.request_id)

    def abort(self, request_id: str) -> bool:
        self.queue.remove(request_id)
        return True

    def stop(self, request_id: str, index: int) -> bool:
        self.stopped.append((request_id, index))
        return True

    def step(self) -> list[SequenceUpdate]:
        self.stats.num_steps += 1
        self._left = (self._left or self._num_tokens) - 1
        if self._left:
            return [SequenceUpdate(self.queue[0], 0, (7,))]
        return [SequenceUpdate(self.queue.pop(0), 0, (7,), finish_reason="length")]

    def started(self, updates: Iterable[SequenceUpdate]) -> set[str]:
        return {update.request_id for update in updates}

    def queue_stats(self) -> QueueStats:
        return QueueStats(bool(self.queue), max(0, len(self.queue) - 1))

    def snapshot(self) -> EngineStats:
        return EngineStats(self.stats)

    def reset_prefix_cache(self) -> None: ...

    def check_integrity(self) -> None:
        self.num_checks += 1

    def check_ranks(self) -> None:
        if self.dead:
            raise EngineDead("rank 1 is gone")


class Transport:
    """Gives commands in order; a None means that none has come. Ends the loop after the last, when it is idle."""

    def __init__(self, *commands: Command | None) -> None:
        self._commands = deque(commands)
        self.reports: list[StepReport] = []
        self.refused: list[tuple[str, str]] = []

    def receive(self, seconds: float) -> Command | None:
        if self._commands:
            return self._commands.popleft()
        return EngineLoop.end if seconds else None

    def publish(self, report: StepReport) -> None:
        self.reports.append(report)

    def refuse(self, request_id: str, fault: Exception) -> None:
        self.refused.append((request_id, str(fault)))


def add(name: str) -> Command:
    return lambda loop: loop.add(Request(name, [1], SamplingParams()))


def published(transport: Transport) -> list[str]:
    return [update.request_id for report in transport.reports for update in report.updates]


def test_requests_are_served_and_a_refused_one_fails_alone():
    engine, transport = Engine(), Transport(add("a"), add("bad"), add("b"))
    EngineLoop(engine, transport).run()
    assert published(transport) == ["a"] * 3 + ["b"] * 3
    assert transport.refused == [("bad", "never")]
    started = [one.request_id for report in transport.reports for one in report.started]
    assert started == ["a", "b"]


def test_commands_are_served_between_steps():
    stop: Command = lambda loop: loop.stop("a", 0)
    abort: Command = lambda loop: loop.abort(["b"])
    engine, transport = Engine(), Transport(add("a"), add("b"), None, stop, None, abort)
    EngineLoop(engine, transport).run()
    assert published(transport) == ["a"] * 3
    assert engine.stopped == [("a", 0)]


def test_stats_are_published_at_idle_and_now_and_then_while_busy(monkeypatch: pytest.MonkeyPatch):
    def steps_with_stats(seconds: float) -> list[bool]:
        monkeypatch.setattr(loops, "STATS_SECONDS", seconds)
        transport = Transport(add("a"))
        EngineLoop(Engine(num_tokens=4), transport).run()
        return [report.stats is not None for report in transport.reports if report.updates]

    assert steps_with_stats(-1.0) == [True] * 4
    assert sum(steps_with_stats(1000.0)) <= 1
    transport = Transport(add("a"))
    EngineLoop(Engine(), transport).run()
    last = transport.reports[-1]
    assert (last.updates, last.queue) == ([], QueueStats())
    assert last.stats is not None
    assert last.stats.steps.num_steps == 3


def test_an_idle_loop_checks_the_pool_once_and_publishes_nothing():
    engine, transport = Engine(), Transport(add("a"), *[None] * 8)
    EngineLoop(engine, transport).run()
    assert engine.num_checks == 1
    # before and after the request
    assert len([report for report in transport.reports if not report.updates]) <= 2


def test_an_idle_loop_ends_when_a_rank_is_gone():
    engine = Engine()
    engine.dead = True
    with pytest.raises(EngineDead, match="rank 1 is gone"):
        EngineLoop(engine, Transport(*[None] * 8)).run()


def test_a_shutdown_signal_finishes_open_requests_and_ends_the_loop():
    shutdown = ShutdownSignal()

    def request_shutdown(_loop: EngineLoop) -> None:
        shutdown.requested = True

    engine, transport = Engine(), Transport(add("a"), None, request_shutdown, add("late"))
    EngineLoop(engine, transport, shutdown).run()
    assert published(transport) == ["a"] * 3
    assert transport.refused == [("late", "the engine is shutting down: try again later")]
    assert not engine.queue


def test_the_end_drops_what_runs():
    engine, transport = Engine(), Transport(add("a"), None, EngineLoop.end)
    EngineLoop(engine, transport).run()
    assert published(transport) == ["a"]


def test_turns_and_idleness_are_visible_to_the_heartbeat():
    seen: list[bool] = []
    loop: EngineLoop

    class Watching(Transport):
        def receive(self, seconds: float) -> Callable[[EngineLoop], None] | None:
            seen.append(loop.is_idle)
            assert loop.is_idle == bool(seconds)
            return super().receive(seconds)

    loop = EngineLoop(Engine(), Watching(add("a")))
    loop.run()
    assert loop.num_turns == 3
    assert set(seen) == {True, False}
