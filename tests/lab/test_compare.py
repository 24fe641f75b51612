"""Comparisons of times: intervals that cover, claims that are silent on noise, and rounds that end."""

import math
import random
from contextlib import contextmanager
from dataclasses import replace

import pytest

from quire_lab.measure.compare import interleave
from quire_lab.report.data import DataFolder
from quire_lab.report.experiment import Check, Setup, Size
from quire_lab.report.figure import error_bars
from quire_lab.report.interval import Interval, Ratio, all_held

TRIALS = 400


class NoBar:
    def __call__(self, count=1):
        pass

    def note(self, what):
        pass


@contextmanager
def no_progress(total, unit):
    yield NoBar()


class Clock:
    """Moves only when something is measured."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


SETUP = Setup(Size.NORMAL, 0, {}, DataFolder(None), no_progress, 1.0, time_limit=200.0)
# what other processes do to times: little, much, rare and long, two levels
NOISES = {
    "5 %": lambda drawn: math.exp(drawn.gauss(0, 0.05)),
    "20 %": lambda drawn: math.exp(drawn.gauss(0, 0.2)),
    "spikes": lambda drawn: 1 + 0.02 * drawn.random() + (drawn.random() < 0.2) * drawn.expovariate(0.2),
    "levels": lambda drawn: drawn.choice((1, 1, 1, 3)) * (1 + 0.03 * drawn.random()),
}


def compared(noise, drawn, effect=1.0, setup=SETUP):
    """A against B, which takes `effect` times as long; a measurement takes its value in seconds."""
    clock = Clock()

    def timed(factor):
        value = factor * noise(drawn)
        clock.now += value
        return value

    variants = {"a": lambda: timed(1.0), "b": lambda: timed(effect)}
    return interleave(setup, variants, float, "test", clock=clock).ratio("b", "a", float)


@pytest.mark.parametrize("noise", NOISES)
def test_a_against_a_is_not_resolved_and_the_interval_covers(noise):
    drawn = random.Random(1)
    same = [compared(NOISES[noise], drawn) for _ in range(TRIALS)]
    assert sum(not ratio.resolved for ratio in same) >= 0.94 * TRIALS
    larger = [compared(NOISES[noise], drawn, 1.5) for _ in range(TRIALS)]
    assert sum(ratio.interval.low <= 1.5 <= ratio.interval.high for ratio in larger) >= 0.94 * TRIALS
    assert sum(ratio.resolved and not ratio.is_above for ratio in larger) <= 0.02 * TRIALS


def test_an_effect_above_the_noise_is_resolved():
    drawn = random.Random(2)
    ratios = [compared(NOISES["5 %"], drawn, 1.3) for _ in range(50)]
    assert all(ratio.is_above for ratio in ratios)
    assert all(ratio.interval.is_tight(0.05) for ratio in ratios)


def test_a_drift_of_the_machine_is_no_effect():
    clock = Clock()

    def slower_and_slower():
        clock.now += 1.0
        return 1.0 + 0.02 * clock.now

    ratio = interleave(
        SETUP, {"a": slower_and_slower, "b": slower_and_slower}, float, "test", clock=clock
    ).ratio("b", "a", float)
    assert not ratio.resolved
    assert ratio.interval.low < 1 < ratio.interval.high


def test_rounds_end_when_the_interval_is_tight_or_the_time_is_up():
    drawn, quiet = random.Random(3), lambda _: 1.0
    assert compared(quiet, drawn).interval.num_values == 6
    noisy = compared(NOISES["20 %"], drawn, setup=replace(SETUP, time_limit=40.0))
    assert not noisy.interval.is_tight(0.05)
    assert 40.0 <= noisy.seconds < 44.0
    loose = compared(NOISES["20 %"], random.Random(3), setup=replace(SETUP, precision=0.5))
    assert loose.interval.num_values < noisy.interval.num_values
    assert compared(quiet, drawn, setup=replace(SETUP, time_limit=0.0)).interval.num_values == 1


def test_the_order_turns_around():
    order = []
    variants = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    interleave(SETUP, variants, float, "test")
    assert "".join(order).startswith("abccba")


def test_choosing_among_several_widens_the_interval():
    drawn = random.Random(4)
    variants = {"a": lambda: drawn.gauss(1, 0.1), "b": lambda: drawn.gauss(1, 0.1)}
    ticks = iter(range(10_000))
    setup = replace(SETUP, time_limit=100.0, precision=1e-6)
    measured = interleave(setup, variants, float, "test", clock=lambda: next(ticks))
    alone, chosen = (measured.ratio("b", "a", float, n).interval for n in (1, 8))
    assert chosen.low <= alone.low < alone.high <= chosen.high
    assert chosen.high - chosen.low > alone.high - alone.low


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 1.8], "1.80 times as fast (1.60 to 2.10, 95 %, 7 pairs)"),
        ([0.1, 0.11, 0.1, 0.12, 0.1, 0.1], "0.10 times as fast (0.10 to 0.12, 95 %, 6 pairs)"),
        (
            [0.9, 1.0, 1.2, 1.1, 1.0, 1.1],
            "not resolved on this machine: 0.90 to 1.20 times as fast after 60 s (6 pairs); "
            "run on an idle machine or with a longer --time-limit",
        ),
        ([0.99, 1.0, 1.01, 1.0, 1.0, 1.02], "equal within 5 % (0.99 to 1.02, 95 %, 6 pairs)"),
        (
            [0.1, 0.1, 0.1],
            "not resolved on this machine: after 60 s (3 pairs); "
            "run on an idle machine or with a longer --time-limit",
        ),
    ],
)
def test_only_what_the_interval_shows_is_said(values, expected):
    assert Ratio(Interval.of(values), 60.0, 0.05).claim("times as fast") == expected


def test_too_few_values_have_no_interval_and_no_error_bar():
    few = Interval.of([1.0, 2.0])
    assert few.record() == {"n": 2, "median": 1.5, "low": None, "high": None}
    assert few.text() == "1.50"
    assert error_bars([few]) == [[0.0], [0.0]]
    assert few.is_above(0.5) is None
    assert "not resolved on this machine (too few pairs)" in Ratio(few, 1.0, 0.05).short("times")


def test_a_check_that_noise_hides_is_not_resolved():
    interval = Interval.of([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    assert (interval.is_below(1.6), interval.is_below(1.2), interval.is_below(0.9)) == (True, None, False)
    assert all_held([True, None]) is None
    assert all_held([True, None, False]) is False
    assert Check("a", "b", None).outcome == "not resolved"
