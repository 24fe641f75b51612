"""The queue is bounded by requests and by tokens, and refuses at once."""

import pytest

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.sampling import SamplingParams
from quire.link.admission import MAX_RETRY_SECONDS, Admission, Ask, Bounds
from quire.link.messages import Figures

BUSY = Figures(num_running=4, num_waiting=1)
IDLE = Figures()


def asks(*lengths: int, name: str = "r") -> list[Ask]:
    return [Ask(f"{name}{i}", [0] * length, SamplingParams()) for i, length in enumerate(lengths)]


def test_no_more_requests_wait_than_are_allowed():
    admission = Admission(Bounds(2))
    for name in "ab":
        admission.check(asks(5, name=name), BUSY, max_num_seqs=4)
        admission.enter(asks(5, name=name))
    with pytest.raises(QueueFull, match=r"2 requests are waiting already.*max_queue_requests"):
        admission.check(asks(5), BUSY, max_num_seqs=4)
    admission.begin("a0")
    admission.check(asks(5), BUSY, max_num_seqs=4)
    assert (admission.num_waiting, admission.num_running) == (1, 1)


def test_an_idle_engine_takes_a_burst_that_fills_its_rows_and_the_queue():
    admission = Admission(Bounds(2))
    for number in range(6):
        admission.check(asks(5, name=str(number)), IDLE, max_num_seqs=4)
        admission.enter(asks(5, name=str(number)))
    with pytest.raises(QueueFull):
        admission.check(asks(5), IDLE, max_num_seqs=4)


def test_no_more_prompt_tokens_wait_than_are_allowed_but_one_prompt_always_may():
    admission = Admission(Bounds(10, max_tokens=100))
    admission.check(asks(500), BUSY, max_num_seqs=4)
    admission.enter(asks(60, name="a"))
    with pytest.raises(QueueFull, match="60 prompt tokens are waiting and 41 more would pass 100"):
        admission.check(asks(41), BUSY, max_num_seqs=4)
    admission.leave("a0")
    admission.check(asks(41), BUSY, max_num_seqs=4)


def test_a_batch_is_taken_whole_or_not_at_all():
    admission = Admission(Bounds(3))
    admission.enter(asks(1, 1, name="a"))
    with pytest.raises(QueueFull):
        admission.check(asks(1, 1), BUSY, max_num_seqs=4)


def test_a_batch_that_could_never_wait_is_the_callers_mistake():
    with pytest.raises(InvalidRequest, match="8 prompts in one request are more than can run and wait"):
        Admission(Bounds(3)).check(asks(*[1] * 8), IDLE, max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="120 tokens together and 100 may wait"):
        Admission(Bounds(10, max_tokens=100)).check(asks(60, 60), IDLE, max_num_seqs=4)


def test_leaving_twice_and_beginning_after_the_end_change_nothing():
    admission = Admission(Bounds(3, max_tokens=10))
    admission.enter(asks(4))
    admission.leave("r0")
    admission.leave("r0")
    admission.begin("r0")
    assert (admission.num_waiting, admission.num_running) == (0, 0)
    admission.check(asks(5, 5), BUSY, max_num_seqs=1)


def test_retry_after_is_a_sensible_number_of_seconds():
    admission = Admission(Bounds(1000))
    assert admission.retry_seconds() == 1
    admission.enter(asks(*[1] * 900))
    admission._seconds_per_begin = 5.0
    assert admission.retry_seconds() == MAX_RETRY_SECONDS
