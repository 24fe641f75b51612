"""The queue is bounded by requests and by tokens, and refuses at once."""

import pytest

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.request import QueueBounds, Request
from quire.core.sampling import SamplingParams
from quire.core.stats import QueueStats
from quire.link.client import MAX_RETRY_SECONDS, QueueAdmission

BUSY = QueueStats(num_running=4, num_waiting=1)
IDLE = QueueStats()


def requests(*lengths: int, name: str = "r") -> list[Request]:
    return [Request(f"{name}{i}", [0] * length, SamplingParams()) for i, length in enumerate(lengths)]


def test_no_more_requests_wait_than_are_allowed():
    admission = QueueAdmission(QueueBounds(2))
    for name in "ab":
        admission.check(requests(5, name=name), BUSY, max_num_seqs=4)
        admission.enter(requests(5, name=name))
    with pytest.raises(QueueFull, match=r"2 requests are waiting already.*max_queue_requests"):
        admission.check(requests(5), BUSY, max_num_seqs=4)
    admission.start("a0")
    admission.check(requests(5), BUSY, max_num_seqs=4)
    assert admission.num_waiting == 1


def test_an_idle_engine_takes_a_burst_that_fills_its_rows_and_the_queue():
    admission = QueueAdmission(QueueBounds(2))
    for number in range(6):
        admission.check(requests(5, name=str(number)), IDLE, max_num_seqs=4)
        admission.enter(requests(5, name=str(number)))
    with pytest.raises(QueueFull):
        admission.check(requests(5), IDLE, max_num_seqs=4)


def test_no_more_prompt_tokens_wait_than_are_allowed_but_one_prompt_always_may():
    admission = QueueAdmission(QueueBounds(10, max_tokens=100))
    admission.check(requests(500), BUSY, max_num_seqs=4)
    admission.enter(requests(60, name="a"))
    with pytest.raises(QueueFull, match="60 prompt tokens are waiting and 41 more would pass 100"):
        admission.check(requests(41), BUSY, max_num_seqs=4)
    admission.leave("a0")
    admission.check(requests(41), BUSY, max_num_seqs=4)


def test_a_batch_is_taken_whole_or_not_at_all():
    admission = QueueAdmission(QueueBounds(3))
    admission.enter(requests(1, 1, name="a"))
    with pytest.raises(QueueFull):
        admission.check(requests(1, 1), BUSY, max_num_seqs=4)


def test_a_batch_that_could_never_wait_is_the_callers_mistake():
    with pytest.raises(InvalidRequest, match="8 prompts in one request are more than can run and wait"):
        QueueAdmission(QueueBounds(3)).check(requests(*[1] * 8), IDLE, max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="120 tokens together and 100 may wait"):
        QueueAdmission(QueueBounds(10, max_tokens=100)).check(requests(60, 60), IDLE, max_num_seqs=4)


def test_leaving_twice_and_starting_after_the_end_change_nothing():
    admission = QueueAdmission(QueueBounds(3, max_tokens=10))
    admission.enter(requests(4))
    admission.leave("r0")
    admission.leave("r0")
    admission.start("r0")
    assert admission.num_waiting == 0
    admission.check(requests(5, 5), BUSY, max_num_seqs=1)


def test_retry_after_is_a_sensible_number_of_seconds():
    admission = QueueAdmission(QueueBounds(1000))
    assert admission.retry_seconds() == 1
    admission.enter(requests(*[1] * 900))
    admission._seconds_per_start = 5.0
    assert admission.retry_seconds() == MAX_RETRY_SECONDS
