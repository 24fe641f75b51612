"""Steps with prompts end in time: their size follows what steps took."""

import pytest

from quire.core.config import SchedulerConfig
from quire.core.errors import ConfigError
from quire.memory.paged import PagedMemory
from quire.scheduler.pacing import BACKLOG, FEWEST, FIRST, SHORTEST_BUSY, Pacing
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import request, step


def note(pacing, rows, prompt, seconds):
    """A step of `rows` decodes and a prompt chunk."""
    pacing.note(rows + prompt, rows + (prompt > 0), seconds)


def device(tokens):
    """An H200 with 8 billion parameters, roughly: bound by memory, then by arithmetic."""
    return max(0.005, 23e-6 * tokens)


def settle(pacing, rows, seconds=device, waiting=10**4):
    for _ in range(10):
        note(pacing, rows, 0, seconds(rows))
    prompt = FIRST
    for _ in range(12):
        note(pacing, rows, prompt, seconds(rows + prompt))
        prompt = pacing.prompt_tokens(rows, waiting)
    return prompt


@pytest.mark.parametrize("goal", [0.008, 0.016, 0.1])
def test_a_goal_is_met_and_used(goal):
    prompt = settle(Pacing(goal), 32)
    assert 0.8 * goal < device(32 + prompt) <= goal * 1.06  # sizes are rounded


def test_auto_allows_a_multiple_of_a_decode_step():
    prompt = settle(Pacing(None), 32, waiting=1000)
    assert 2.0 * device(32) < device(32 + prompt) < 2.7 * device(32)
    slow = settle(Pacing(None), 8, lambda tokens: 0.015 + 0.00043 * tokens, waiting=1000)  # a CPU
    assert 2.2 * 0.0185 < 0.015 + 0.00043 * (8 + slow) < 2.6 * 0.0185


def test_steps_recover_after_a_slow_one():
    """A CPU whose decode steps take 12 ms: small steps have a high cost per token, which is the decodes'."""

    def cpu(tokens):
        return 0.0112 + 0.0001 * tokens

    pacing = Pacing(None)
    settled = settle(pacing, 8, cpu, waiting=100)
    for _ in range(3):
        note(pacing, 8, settled, 10 * cpu(8 + settled))
    assert pacing.prompt_tokens(8, 100) == FEWEST
    for _ in range(20):
        prompt = pacing.prompt_tokens(8, 100)
        note(pacing, 8, prompt, cpu(8 + prompt))
    assert abs(prompt - settled) <= 16


def test_a_goal_is_kept_after_a_load_that_is_gone():
    """The last decode steps had 256 rows and took longer than steps with prompts take now."""

    def cpu(tokens):
        return 0.004 + 0.0001 * tokens

    pacing = Pacing(0.015)
    for _ in range(10):
        note(pacing, 256, 0, cpu(256))
    prompt = FIRST
    for _ in range(30):
        note(pacing, 8, prompt, cpu(8 + prompt))
        prompt = pacing.prompt_tokens(8, 10**4)
        assert cpu(8 + prompt) < 1.2 * 0.015


def test_a_long_queue_makes_steps_longer_up_to_a_bound():
    pacing = Pacing(None)
    settle(pacing, 32, waiting=1000)
    calm = pacing.prompt_tokens(32, 1000)
    busy = settle(pacing, 32, waiting=BACKLOG * calm * 2)
    assert calm < busy
    assert 0.8 * SHORTEST_BUSY < device(32 + busy) < 1.1 * SHORTEST_BUSY


def test_a_prefill_goes_on_whatever_steps_take():
    pacing = Pacing(0.001)
    note(pacing, 32, 64, 1.0)
    assert pacing.prompt_tokens(32, 0) == FEWEST


def test_many_rows_that_were_never_measured_alone_do_not_starve_prompts():
    """A burst: every step since the first row has had prompts."""
    pacing = Pacing(None)
    note(pacing, 1, 0, 0.004)
    for rows in (1, 100, 300, 500):
        note(pacing, rows, 1000, device(rows + 1000))
    assert pacing.prompt_tokens(500, 0) >= 500


def test_a_scheduler_cuts_prompts_beside_decodes_only():
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=1024, itl_goal="auto")
    scheduler = Scheduler(config, PagedMemory(1024, 4, enable_prefix_caching=False))
    scheduler.add(request("a", 900, max_tokens=8))
    assert step(scheduler) == [("a", 900)]
    scheduler.add(request("b", 600, max_tokens=8, first=1))
    assert step(scheduler) == [("a", 1), ("b", FIRST)]
    assert step(scheduler) == [("a", 1), ("b", FIRST)]
    assert step(scheduler) == [("a", 1), ("b", 600 - 2 * FIRST)]


@pytest.mark.parametrize("wrong", ["soon", "0", "-1", "nan", "inf"])
def test_a_goal_that_is_no_time_is_refused(wrong):
    with pytest.raises(ConfigError, match="itl_goal"):
        SchedulerConfig(itl_goal=wrong)


def test_a_goal_may_be_a_number():
    assert SchedulerConfig(itl_goal=25).itl_seconds == 0.025  # type: ignore[arg-type]
