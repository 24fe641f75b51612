"""A stopped engine, a step that does not end, a long step and an idle engine: four things, told apart."""

import os
import threading
from types import SimpleNamespace

from quire.link import heartbeat
from quire.link.heartbeat import SAME_STEP, STOPPED_SECONDS, TURNED, HeartbeatMonitor, start_heartbeat


def test_only_an_engine_with_work_can_hang():
    monitor = HeartbeatMonitor(timeout=100)
    assert monitor.failure(False, 1000) is None
    assert monitor.failure(True, 1000) is None  # from now on it owes something
    assert monitor.failure(True, 1000 + STOPPED_SECONDS - 1) is None
    assert "no sign of life" in (monitor.failure(True, 1000 + STOPPED_SECONDS + 1) or "")
    assert monitor.failure(False, 1040) is None
    assert monitor.failure(True, 1041) is None


def test_a_long_step_has_its_time_and_then_it_hangs():
    monitor = HeartbeatMonitor(timeout=100)
    monitor.failure(True, 0)
    for now in range(0, 100, 10):
        monitor.take(SAME_STEP, now)
        assert monitor.failure(True, now) is None
    monitor.take(SAME_STEP, 101)
    assert "in one step for 101 s" in (monitor.failure(True, 101) or "")
    monitor.take(SAME_STEP + TURNED, 102)
    assert monitor.failure(True, 150) is not None  # 48 s without a beat
    monitor.take(SAME_STEP, 150)
    assert monitor.failure(True, 150) is None


def test_beats_say_whether_the_loop_went_round_or_waits(monkeypatch):
    """Each beat is let go by the test: what the loop did before it is then certain."""
    reads, writes = os.pipe()
    due = threading.Semaphore(0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(sleep=lambda _seconds: due.acquire()))
    loop = SimpleNamespace(num_turns=0, is_idle=False)
    start_heartbeat(writes, loop)
    said = [os.read(reads, 1)]

    def next_beat() -> None:
        due.release()
        said.append(os.read(reads, 1))

    try:
        next_beat()
        loop.num_turns += 1
        next_beat()
        next_beat()
        loop.is_idle = True
        next_beat()
        next_beat()
        assert said == [TURNED, SAME_STEP, TURNED, SAME_STEP, TURNED, TURNED]
    finally:
        os.close(reads)
        due.release()  # nobody listens any more: the thread ends
        for thread in threading.enumerate():
            if thread.name == "heartbeat":
                thread.join(30)
        os.close(writes)
