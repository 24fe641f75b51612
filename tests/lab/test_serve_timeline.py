"""The time line of `quire bench serve`: late gaps, and the engine step that covers each."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from quire.bench.serve import EngineStep, Outcome, Round
from quire.bench.serve_report import parse_metrics
from quire.core.errors import ConfigError
from quire_lab.report.serve_timeline import check_timeline, late_tokens, timeline_svg, timeline_table

# a step of 10 ms each, except the 50th, which has a prefill and takes 100 ms
STEPS = [
    EngineStep(i, at, at + (0.1 if i == 50 else 0.01), 512 if i == 50 else 0, 2)
    for i, at in ((i, 100.0 + 0.01 * i + (0.09 if i > 50 else 0.0)) for i in range(101))
]


def streamed(times):
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Outcome(sent=100.0, first_token=times[0], ended=times[-1], gaps=gaps)


def run_of(*streams):
    return Round(1.0, 1.2, [streamed(times) for times in streams], [0.0] * len(streams), 0.1, len(streams))


def test_the_step_with_the_prefill_is_named():
    times = [step.ended + 0.001 for step in STEPS]
    run = run_of(times, times)
    late = late_tokens(run, STEPS)
    assert [(token.stream, token.step.step_id) for token in late] == [(0, 50), (1, 50)]
    assert all(token.seconds == pytest.approx(0.1) and token.share > 0.9 for token in late)
    line = timeline_table(late).splitlines()[1]
    for word in ("100.0", "50", "512", "99%", "prefill and decode"):
        assert word in line
    picture = ElementTree.fromstring(timeline_svg(run, STEPS, late))
    assert sum("C00000" in part.get("fill", "") for part in picture) == 2


def test_a_gap_that_no_step_covers_is_not_the_engines():
    times = [100.0 + 0.001 * i for i in range(200)]
    times += [times[-1] + 0.5]
    (token,) = late_tokens(run_of(times), STEPS[:30])
    assert token.share < 0.5
    assert token.cause.startswith("no single step")
    assert late_tokens(run_of([100.0]), STEPS) == []
    (alone,) = late_tokens(run_of(times), [])
    assert alone.step is None


def test_words_that_are_not_known_are_refused():
    with pytest.raises(ConfigError, match=r"ends in \.html or \.svg"):
        check_timeline("x.png")
    with pytest.raises(ConfigError, match="write some of ttft,tpot,itl,e2el"):
        parse_metrics("ttft,speed")
    assert parse_metrics("ttft, itl") == ("ttft", "itl")
