"""Simulated experiments: replays in virtual time, and the orders that were published, at a small size."""

import math

import pytest

from quire.bench.workload import Lengths, named
from quire.core.errors import ConfigError
from quire_lab.experiments.characterize import BATCHING, GridCell, GridJob, measure
from quire_lab.experiments.rate import CurveJob, trace_curve
from quire_lab.experiments.trace import TraceJob, hold, load_trace
from quire_lab.measure.replay import Arrival, Replay
from quire_lab.measure.sharing import sampling_for
from quire_lab.measure.simulated_runs import (
    PAPER,
    POLICIES,
    RESERVATIONS,
    Run,
    basis,
    build_simulated,
    replayed,
    simulate,
    workload,
)
from quire_lab.report.data import DataFolder

NOWHERE = DataFolder(None)
SMALL = {**PAPER, "model": "opt-125m", "kv_cache_memory_bytes": 64 << 20}  # quick steps, 113 blocks


def replay(arrivals, sampling=None, **settings):
    built = build_simulated({**SMALL, **settings})
    found = Replay(built, arrivals, *([sampling] if sampling else [])).run()
    built.engine.check_integrity()
    return found


def test_requests_enter_at_their_moments_and_idle_time_is_skipped():
    found = replay([Arrival(1.0, Lengths(16, 8)), Arrival(3600.0, Lengths(16, 8))])
    first, second = found.served
    assert first.arrival == 1.0 < first.first_token < first.last_token < 2.0
    assert second.arrival == 3600.0 < second.first_token < found.seconds < 3601.0
    assert first.normalised == pytest.approx(second.normalised)
    assert found.num_steps == 16


def test_the_same_run_gives_the_same_point():
    run = Run(SMALL, named("alpaca", 60, 0), 50.0, seed=3)
    assert simulate(run) == simulate(run)


def test_a_request_that_can_never_run_is_counted():
    found = replay(
        [Arrival(0.0, Lengths(1500, 500)), Arrival(0.0, Lengths(3000, 5)), Arrival(0.0, Lengths(10, 5))]
    )
    assert found.num_refused == 2
    assert len(found.served) == 1


def test_beams_are_one_request_each():
    arrivals = [Arrival(0.0, Lengths(32, 12))] * 3
    found = replay(arrivals, lambda n: sampling_for("beam", 4, n))
    assert len(found.served) == 3
    assert found.num_output_tokens == 3 * 4 * 12
    assert all(one.num_output_tokens == 12 for one in found.served)


def test_real_time_cannot_be_replayed(tiny_built):
    with pytest.raises(ConfigError, match="device='simulated'"):
        Replay(tiny_built[1], [])


@pytest.mark.parametrize(("name", "count", "gib"), [("sharegpt", 90, 12), ("alpaca", 200, 4)])
def test_the_published_order_max_pow2_oracle_paged(name, count, gib):
    """In requests at once and in sustained rate."""
    settings = {**PAPER, "kv_cache_memory_bytes": gib << 30}
    lengths = workload(name, NOWHERE, count, 0).lengths
    points = [
        simulate(Run({**settings, **POLICIES[policy]}, lengths, math.inf, 0)) for policy in RESERVATIONS
    ]
    batched = [one.mean_full for one in points]
    rates = [one.capacity for one in points]
    assert batched == sorted(batched)
    assert rates == sorted(rates)
    assert batched[0] == pytest.approx((gib << 30) // 819_200 // 2048, abs=0.2)  # 2,048 positions each
    assert rates[-1] > 2 * rates[0]


def test_request_level_batches_sustain_less_than_continuous_ones():
    lengths = named("sharegpt", 50, 0)
    rate = {
        policy: simulate(Run({**PAPER, **POLICIES[policy]}, lengths, math.inf, 0)).capacity
        for policy in ("ft", "max", "dynamic", "paged")
    }
    assert rate["ft"] < rate["max"] < rate["paged"]
    assert rate["dynamic"] < rate["paged"]


def test_latency_grows_with_the_rate():
    job = CurveJob(
        "alpaca", "pow2", Run({**PAPER, **POLICIES["pow2"]}, named("alpaca", 150, 0), 1.0, 0), (0.3, 1.5)
    )
    curve = trace_curve(job)
    assert curve.points[0].normalised < curve.points[1].normalised
    assert curve.points[0].rate < curve.sustained < curve.points[1].rate


def test_a_queue_of_equal_requests_served_alone_is_worked_out_exactly():
    cell = GridCell("grid", "opt-125m", PAPER["device"], "none", 8, 10.0)
    settings = {**SMALL, "max_model_len": 1024}
    worked_out = measure(GridJob(cell, settings, 12, 0))
    real = replayed(Run({**settings, **BATCHING["none"]}, [Lengths(512, 8)] * 12, 10.0, 0))
    assert worked_out.normalised == pytest.approx(real.normalised, rel=0.02)
    assert worked_out.output_rate == pytest.approx(real.output_rate, rel=0.02)


def test_a_model_that_no_such_device_holds_says_so():
    cell = GridCell("devices", "opt-66b", "simulated:v100", "paged", 32, math.inf)
    assert (
        "larger" in measure(GridJob(cell, SMALL, 2, 0)).fault
        or "weights" in measure(GridJob(cell, SMALL, 2, 0)).fault
    )


def test_a_chatbots_prompts_grow_up_to_a_limit():
    lengths = workload("chatbot", NOWHERE, 200, 0).lengths
    plain = workload("sharegpt", NOWHERE, 200, 0).lengths
    assert max(one.num_prompt_tokens for one in lengths) == 1024
    assert sum(one.num_prompt_tokens for one in lengths) > 2 * sum(one.num_prompt_tokens for one in plain)


def test_without_the_trace_a_stand_in_says_so(shared):
    stand_in = load_trace(NOWHERE, 50, 0)
    assert not stand_in.is_real
    assert "stand-in" in stand_in.source
    real = load_trace(DataFolder(shared / "data"), 50, 0)
    assert real.is_real
    assert real.arrivals[0].at == 0.0


def test_a_faster_trace_is_served_worse():
    arrivals = load_trace(NOWHERE, 60, 0).arrivals
    settings = {"model": "llama-8b", "device": "simulated:a100-40g", "enable_prefix_caching": False}
    slow, fast = (hold(TraceJob(settings, arrivals, speed)) for speed in (0.2, 50.0))
    assert slow.held == 1.0
    assert fast.first_p99 > slow.first_p99
    assert fast.held < 1.0


def test_every_figure_says_what_it_stands_on():
    words = " ".join(basis(PAPER))
    for needed in ("was not measured", "derived from h200", "held out", "no cost factor was fitted"):
        assert needed in words
