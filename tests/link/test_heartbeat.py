"""A stopped engine, a step that does not end, a long step and an idle engine: four things, told apart."""

import os
import time
from types import SimpleNamespace

from quire.link.heartbeat import BEAT_SECONDS, SAME_STEP, STOPPED_SECONDS, TURNED, Pulse, beat


def test_only_an_engine_with_work_can_hang():
    pulse = Pulse(timeout=100)
    assert pulse.trouble(False, 1000) is None
    assert pulse.trouble(True, 1000) is None  # from now on it owes something
    assert pulse.trouble(True, 1000 + STOPPED_SECONDS - 1) is None
    assert "no sign of life" in (pulse.trouble(True, 1000 + STOPPED_SECONDS + 1) or "")
    assert pulse.trouble(False, 1040) is None
    assert pulse.trouble(True, 1041) is None


def test_a_long_step_has_its_time_and_then_it_hangs():
    pulse = Pulse(timeout=100)
    pulse.trouble(True, 0)
    for now in range(0, 100, 10):
        pulse.take(SAME_STEP, now)
        assert pulse.trouble(True, now) is None
    pulse.take(SAME_STEP, 101)
    assert "in one step for 101 s" in (pulse.trouble(True, 101) or "")
    pulse.take(SAME_STEP + TURNED, 102)
    assert pulse.trouble(True, 150) is not None  # 48 s without a beat
    pulse.take(SAME_STEP, 150)
    assert pulse.trouble(True, 150) is None


def test_beats_say_whether_the_loop_went_round_or_waits():
    reads, writes = os.pipe()
    loop = SimpleNamespace(num_turns=0, waits=False)
    beat(writes, loop)
    try:
        said = [os.read(reads, 1), os.read(reads, 1)]
        loop.num_turns += 1
        said.append(os.read(reads, 1))
        said.append(os.read(reads, 1))
        loop.waits = True
        said += [os.read(reads, 1), os.read(reads, 1)]
        assert said == [TURNED, SAME_STEP, TURNED, SAME_STEP, TURNED, TURNED]
    finally:
        os.close(reads)  # the thread ends at its next beat
        time.sleep(2 * BEAT_SECONDS)
        os.close(writes)
