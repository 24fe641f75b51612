"""Simulated replicas behind the router, and the two experiments over them at their quickest size."""

import json
import random

import pytest

from quire.core.config import EngineConfig
from quire.engine.build import build
from quire.fleet.policies import POLICIES
from quire.fleet.router import Router
from quire_lab.baselines import sglang_routing
from quire_lab.experiments import replicas, routing
from quire_lab.measure.replicas import Fleet, Turn
from quire_lab.report.data import DataFolder
from quire_lab.report.experiment import Setup, Size
from quire_lab.report.files import write_finding
from tests.lab.experiments.conftest import Counted

pytest.importorskip("matplotlib")
SETTINGS = {"model": "llama-1b", "device": "simulated:h200", "num_blocks": 2000}


def fleet(policy: str, count: int = 2) -> Fleet:
    engines = [build(EngineConfig.of(**SETTINGS)) for _ in range(count)]
    return Fleet(engines, Router(POLICIES[policy], [2000 * 16] * count))


def chat(at: float, num_turns: int, seed: int) -> Turn:
    def turn(at: float, history: list[int], left: int) -> Turn:
        words = random.Random(f"{seed} {left}").choices(range(1000), k=200)

        def follow(now: float, answer):
            return turn(now + 1.0, [*history, *words, *answer], left - 1) if left else None

        return Turn(at, lambda: [*history, *words], 20, follow)

    return turn(at, [], num_turns - 1)


def test_every_turn_is_served_and_history_is_found_again_where_it_was_computed():
    served = fleet("prefix-work").run(chat(0.2 * n, 4, n) for n in range(5))
    assert len(served.whole) == len(served.first_tokens) == 20
    assert served.num_output_tokens == 20 * 20
    assert served.hit_rate > 0.5
    by_turns = fleet("round-robin").run(chat(0.2 * n, 4, n) for n in range(5))
    assert by_turns.hit_rate < served.hit_rate


def test_one_replica_and_two_compute_the_same_and_two_sooner():
    turns = [Turn(0.0, lambda n=n: [n] * 2000, 30) for n in range(1, 9)]
    one, two = fleet("least-work", 1).run(turns), fleet("least-work", 2).run(turns)
    assert one.num_output_tokens == two.num_output_tokens
    assert two.seconds < 0.75 * one.seconds
    assert two.max_share == pytest.approx(1.0)


def test_sglangs_rule_prefers_a_match_then_the_smallest_tree_and_the_fewest_requests_out_of_balance():
    router = Router(sglang_routing.costs, [1 << 20] * 2)
    loads = router.loads
    loads[0].shadow.num_tokens = 100
    assert sglang_routing.costs(loads, 100, [40, 20]) == [-40, -20]
    assert sglang_routing.costs(loads, 100, [20, 10]) == [100, 0]
    loads[1].stats.num_open = 65
    assert sglang_routing.costs(loads, 100, [20, 90]) == [0, 65]


@pytest.fixture
def setup() -> Setup:
    return Setup(Size.QUICK, 0, {}, DataFolder(None), Counted().opened, 1.0)


def test_routing_compares_policies_and_says_that_the_trace_is_missing(setup, tmp_path):
    finding = routing.run(setup)
    assert {run["rule"] for run in finding.results["runs"]} == set(routing.RULES)
    assert {run["workload"] for run in finding.results["runs"]} == {routing.SHARED, routing.CHATS}
    assert any("Mooncake's trace is left out" in note for note in finding.notes)
    done = write_finding(routing.EXPERIMENT, finding, 1.0, tmp_path)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in done.pictures)
    assert json.loads((tmp_path / "routing.json").read_text())["results"]["runs"]


def test_the_trace_is_used_where_it_is(shared):
    path = shared / "data" / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("no mooncake trace in the shared data")
    routed = routing.simulate(routing.RoutingJob(routing.MOONCAKE, routing.OURS, 12, 0, str(path)))
    assert routed.num_requests == 12
    assert routed.first_mean > 0


def test_small_models_are_replicated_and_large_ones_split(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(replicas, "MODELS", ("opt-125m", "opt-13b"))
    finding = replicas.run(setup)
    full = {(run["model"], run["num_gpus"], run["scheme"]): run for run in finding.results["runs"]}
    small = [full["opt-125m", 4, scheme]["output_rate"] for scheme in (replicas.TENSOR, replicas.REPLICAS)]
    assert small[0] < small[1]
    assert (
        full["opt-13b", 4, replicas.TENSOR]["num_blocks"]
        > full["opt-13b", 4, replicas.REPLICAS]["num_blocks"]
    )
    write_finding(replicas.EXPERIMENT, finding, 1.0, tmp_path)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    finding.pictures[0].draw(figure)
    for axis in figure.axes:
        low, high = axis.get_xlim()
        assert 1 <= sum(low <= tick <= high for tick in axis.get_xticks()) <= 3
