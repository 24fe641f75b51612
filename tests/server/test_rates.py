"""Rates per key, on a clock of our own."""

import pytest

from quire.server.access import RATE_HEADERS, Allowance, Rates, TokenBucket, shown_duration
from quire.server.errors import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_minutes_worth_may_come_at_once_and_then_as_it_refills():
    clock = Clock()
    allowance = Rates(requests_per_minute=6, clock=clock).of("a")
    for _ in range(6):
        allowance.take_request()
    with pytest.raises(ApiError, match="6 requests per minute: try again in 10s") as caught:
        allowance.take_request()
    assert (caught.value.status, caught.value.code, caught.value.kind) == (
        429,
        "rate_limit_exceeded",
        "requests",
    )
    assert caught.value.headers == {"Retry-After": "10", "retry-after-ms": "10000"}
    clock.now = 10
    allowance.take_request()
    clock.now = 1000
    assert allowance.headers()["x-ratelimit-remaining-requests"] == "6"  # never more than a minute's worth


def test_an_answer_may_overdraw_and_the_debt_is_waited_for():
    clock = Clock()
    allowance = Rates(tokens_per_minute=60, clock=clock).of("a")
    allowance.check_tokens(60)
    allowance.spend_tokens(50)
    allowance.spend_tokens(40)
    with pytest.raises(ApiError, match="try again in 31s"):
        allowance.take_request()
    assert allowance.headers() == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }
    clock.now = 31
    allowance.take_request()
    with pytest.raises(ApiError, match="61 tokens and this key may have 60 per minute") as hopeless:
        allowance.check_tokens(61)
    assert "Retry-After" not in hopeless.value.headers


def test_keys_do_not_share_and_no_limit_is_no_header():
    rates = Rates(requests_per_minute=1, tokens_per_minute=10, clock=Clock())
    rates.of("a").take_request()
    rates.of("b").take_request()
    assert set(rates.of("a").headers()) == set(RATE_HEADERS)
    free = Allowance()
    free.take_request()
    free.check_tokens(10**9)
    free.spend_tokens(10**9)
    assert free.headers() == rates.of(None).headers() == {}
    assert TokenBucket(5).level == 5


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0ms"), (0.1201, "121ms"), (7.5, "7.5s"), (60, "1m0s"), (361, "6m1s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, shown: str):
    assert shown_duration(seconds) == shown
