"""Counters, gauges, histograms and their registry."""

import json
import threading

import pytest

from quire.observe.counters import SECONDS, TOKENS, Counter, Gauge, Histogram, Registry


def test_a_counter_only_grows():
    counter = Counter()
    counter.add()
    counter.add(4)
    assert counter.value == 5
    with pytest.raises(ValueError, match="use a gauge"):
        counter.add(-1)


def test_a_gauge_goes_both_ways():
    gauge = Gauge()
    gauge.set(7)
    gauge.add(-3)
    assert gauge.value == 4


def test_a_histogram_counts_a_bound_into_its_own_bucket_and_keeps_the_rest_above():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 99):
        histogram.observe(value)
    histogram.observe(1.5, count=2)
    assert histogram.snapshot() == {"bounds": [1, 2], "counts": [2, 4, 1], "sum": 107.0, "count": 7}


@pytest.mark.parametrize("bounds", [(), (2, 1), (1, 1)])
def test_bounds_must_rise(bounds):
    with pytest.raises(ValueError, match="larger than the one before"):
        Histogram(bounds)


def test_the_given_bounds_rise():
    for bounds in (SECONDS, TOKENS):
        assert Histogram(bounds).bounds == bounds


def test_no_addition_is_lost_between_threads():
    counter, histogram = Counter(), Histogram((1,))

    def work():
        for _ in range(5000):
            counter.add()
            histogram.observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == histogram.count == 20_000


def test_a_registry_gives_the_same_metric_for_the_same_name_and_labels():
    registry = Registry()
    stop = registry.counter("request_success_total", "Requests that ended well.", finished_reason="stop")
    length = registry.counter("request_success_total", finished_reason="length")
    assert stop is registry.counter("request_success_total", finished_reason="stop")
    assert stop is not length


def test_two_registries_share_nothing():
    first, second = Registry(), Registry()
    first.counter("steps_total").add()
    assert second.counter("steps_total").value == 0


def test_a_name_keeps_its_kind_and_its_bounds():
    registry = Registry()
    registry.gauge("running")
    registry.histogram("step_seconds", bounds=(1, 2))
    with pytest.raises(ValueError, match="running is a gauge already"):
        registry.counter("running")
    with pytest.raises(ValueError, match="has the bounds"):
        registry.histogram("step_seconds", bounds=(1, 3))


def test_a_snapshot_is_plain_data_that_later_counts_do_not_change():
    registry = Registry()
    registry.counter("ended_total", "Ended requests.", reason="stop").add(2)
    registry.histogram("step_seconds", bounds=(1,)).observe(0.5)
    snapshot = registry.snapshot()
    registry.counter("ended_total", reason="stop").add()
    assert json.loads(json.dumps(snapshot)) == {
        "ended_total": {
            "kind": "counter",
            "help": "Ended requests.",
            "series": [{"labels": {"reason": "stop"}, "value": 2}],
        },
        "step_seconds": {
            "kind": "histogram",
            "help": "",
            "series": [{"labels": {}, "bounds": [1.0], "counts": [1, 0], "sum": 0.5, "count": 1}],
        },
    }
