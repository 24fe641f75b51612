"""Placement on groups of GPUs: the simulator, the search against all placements, the plan of a file, the experiment."""

import json
import math
import random
import shlex
import time
from itertools import pairwise
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.core import laboratory
from quire.fleet.plan_file import read_fleet
from quire_lab.experiments import placement
from quire_lab.measure.slices import Slo
from quire_lab.placement import search as searching
from quire_lab.placement.plan import make_plan
from quire_lab.placement.profile import serve, size_model, usable_bytes
from quire_lab.placement.search import (
    Case,
    beam_fill,
    divisions,
    exhaustive,
    fast_fill,
    nodes_of,
    search,
    shapes_of,
)
from quire_lab.placement.simulate import Group, ModelOnShape, ParallelShape, gamma_trace, simulate
from quire_lab.report.data import DataFolder
from quire_lab.report.experiment import Setup, Size
from quire_lab.report.files import write_finding
from quire_lab.simulate.devices import find_device
from tests.lab.experiments.conftest import Counted

ONE, TWO = ParallelShape(1, 1), ParallelShape(1, 2)
ROOT = Path(__file__).parents[2]


def small_case(seed: int, num_models: int = 3, num_gpus: int = 4) -> Case:
    """Models of random latency, rate and burstiness, of which a GPU holds one or two."""
    chance = random.Random(seed)
    shapes = shapes_of(num_gpus, 2, 4)
    seconds = [chance.uniform(0.1, 0.4) for _ in range(num_models)]
    table = {}
    for shape in shapes:
        share = 1 / shape.tp**0.8 / shape.pp * (1.05 if shape.pp > 1 else 1.0)
        table["gpu", shape] = [
            ModelOnShape(600 // shape.size, one * share, lone=one * share * shape.pp) for one in seconds
        ]
    rates = [chance.uniform(0.5, 2.5) for _ in range(num_models)]
    cvs = [chance.choice([1.0, 2.0, 4.0]) for _ in range(num_models)]
    deadlines = [chance.uniform(1.5, 6.0) * one for one in seconds]
    trace = gamma_trace(rates, cvs, 250, seed)
    return Case({"gpu": num_gpus}, {"gpu": 1000}, {"gpu": shapes}, table, deadlines, trace)


def test_one_model_on_one_gpu_is_a_queue_in_order_of_arrival():
    trace = [(0.0, 0), (0.1, 0), (0.2, 0), (2.0, 0)]
    outcome = simulate(trace, [Group("gpu", ONE, (0,))], {("gpu", ONE): [ModelOnShape(0, 0.4)]}, [math.inf])
    assert outcome.mean_latency == pytest.approx((0.4 + 0.7 + 1.0 + 0.4) / 4)
    refused = simulate(trace, [Group("gpu", ONE, (0,))], {("gpu", ONE): [ModelOnShape(0, 0.4)]}, [0.75])
    assert refused.num_served == (3,)  # the third would take a second


def test_two_stages_take_a_request_each():
    table = {("gpu", TWO): [ModelOnShape(0, 0.2)]}
    outcome = simulate([(0.0, 0), (0.0, 0), (0.0, 0)], [Group("gpu", TWO, (0,))], table, [math.inf])
    assert outcome.seconds == pytest.approx(0.4 + 0.6 + 0.8)


def test_decoding_is_shared_and_waits_for_prompts():
    """Ten tokens after the first. Alone 0.1 s each; two requests of a model 0.12 s, of two models 0.2 s."""
    served = ModelOnShape(0, 0.5, 10, ((0.1, 0.1), (0.12, 0.12)), 1.5)
    table = {("gpu", ONE): [served, served]}
    group = [Group("gpu", ONE, (0, 1))]
    assert simulate([(0.0, 0)], group, table, [math.inf] * 2).seconds == pytest.approx(1.5)
    # two at once: both prompts, then ten rounds together
    assert simulate([(0.0, 0)] * 2, group, table, [math.inf] * 2).seconds == pytest.approx(2 * (1.0 + 1.2))
    assert simulate([(0.0, 0), (0.0, 1)], group, table, [math.inf] * 2).seconds == pytest.approx(
        2 * (1.0 + 2.0)
    )
    # after five tokens the second prompt, then five rounds together, then five alone
    later = simulate([(0.0, 0), (1.0, 0)], group, table, [math.inf] * 2)
    assert later.seconds == pytest.approx((1.0 + 0.5 + 5 * 0.12) + (0.5 + 5 * 0.12 + 5 * 0.1))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_a_trace_has_the_rate_and_the_burstiness_asked_for(cv):
    trace = gamma_trace([2.0, 6.0], [cv, cv], 40_000, 0)
    times = [at for at, model in trace if model == 1]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 6, rel=0.1)
    assert deviation / mean == pytest.approx(cv, rel=0.1)
    assert trace == gamma_trace([2.0, 6.0], [cv, cv], 40_000, 0)


@pytest.mark.parametrize(
    ("seed", "num_models", "num_gpus"), [(0, 3, 3), (1, 3, 3), (2, 4, 2), (3, 2, 4), (4, 3, 3)]
)
def test_the_search_is_within_two_percent_of_all_placements(seed, num_models, num_gpus):
    case = small_case(seed, num_models, num_gpus)
    best = exhaustive(case).outcome.attainment
    assert search(case).outcome.attainment >= 0.98 * best
    fast = max(
        (fast_fill(case, groups) for groups in divisions(case)), key=lambda filled: filled.outcome.score
    )
    assert fast.outcome.attainment >= 0.9 * best  # for cases that are too large for the beam


def test_no_group_has_more_than_its_memory_or_lies_on_two_nodes():
    case = small_case(5)
    for filled in (beam_fill(case, next(divisions(case))), search(case)):
        for group in filled.groups:
            held = sum(case.table[group.gpu, group.shape][model].num_bytes for model in group.models)
            assert held <= 1000
            assert len(set(group.models)) == len(group.models)
    groups = [Group("gpu", ParallelShape(1, size)) for size in (1, 4, 2, 1)]
    nodes = nodes_of(groups, {"gpu": 8}, 4)
    assert nodes == [(1, (2,)), (0, (0, 1, 2, 3)), (1, (0, 1)), (1, (3,))]
    assert nodes_of([Group("gpu", ParallelShape(1, 4))] * 2, {"gpu": 8}, 6) is None


def test_models_of_other_latency_get_gpus_of_their_own(monkeypatch):
    """A short request that waits for a long one is late: together they cannot be served."""
    seconds = [0.02] * 3 + [1.0] * 3
    shapes = shapes_of(8, 1, 1)
    table = {("gpu", shape): [ModelOnShape(300, one, lone=one) for one in seconds] for shape in shapes}
    trace = gamma_trace([8.0] * 3 + [0.4] * 3, [1.0] * 6, 1200, 0)
    case = Case({"gpu": 8}, {"gpu": 1000}, {"gpu": shapes}, table, [3 * one for one in seconds], trace)
    monkeypatch.setattr(searching, "MAX_SIMULATED", 0)
    filled = search(case)
    assert filled.outcome.attainment > 0.95
    mixed = [group for group in filled.groups if {m < 3 for m in group.models} == {True, False}]
    assert not mixed


def test_times_of_a_group_are_those_of_simulated_engines():
    """One model on one GPU with several users: the latency of the engine with its own scheduler and memory."""
    from quire.fleet.mig import CARDS
    from quire_lab.measure.slices import latency

    card = CARDS["a100-80g"]
    device = find_device("simulated:a100-80g-7g.80gb")
    served = serve(size_model({"model": "llama-7b"}, 512, 64), device, ONE)
    assert served is not None
    for users in (1, 8):
        group, table = [Group("gpu", ONE, (0,))], {("gpu", ONE): [served]}
        ours = simulate([(0.0, 0)] * users, group, table, [math.inf]).mean_latency
        engine = latency({"model": "llama-7b"}, card, card.profile("7g.80gb"), users, Slo(1, 100, 512, 64))
        assert ours == pytest.approx(engine.per_request, rel=0.15)


def test_a_shape_divides_memory_and_time():
    device = find_device("simulated:a100-80g")
    sized = size_model({"model": "llama-13b"}, 512, 64)
    one, ranks, stages = (serve(sized, device, shape) for shape in (ONE, ParallelShape(2, 1), TWO))
    assert one is not None
    assert ranks is not None
    assert stages is not None
    assert ranks.num_bytes < 0.6 * one.num_bytes
    assert stages.num_bytes < 0.65 * one.num_bytes
    assert one.lone / 2 < ranks.lone < 0.75 * one.lone  # an all-reduce per layer costs
    assert one.lone < stages.lone < 1.15 * one.lone  # a lone request passes all stages
    assert stages.steps[1][1] == pytest.approx(2 * stages.steps[0][1])  # two requests, each in another stage
    assert serve(size_model({"model": "opt-13b"}, 512, 64), device, TWO) is None  # OPT is not cut into ranks
    assert serve(sized, find_device("simulated:a100-40g"), ONE).num_bytes <= usable_bytes(
        find_device("simulated:a100-40g")
    )


def test_24_models_on_16_gpus_are_placed_in_under_a_minute():
    began = time.process_time()
    plan = make_plan(read_fleet(ROOT / "examples/placement.yaml"))
    assert time.process_time() - began < 60
    replication = plan.record["replication"]
    assert plan.tested.attainment > max(replication.values())
    assert sum(group["tp"] * group["pp"] for group in plan.record["groups"]) <= 16
    assert {model["name"] for model in plan.record["models"] if model["groups"]} == {
        model.name for model in plan.fleet.models
    }
    assert all(max(group["devices"]) < 8 for group in plan.record["groups"])


def write(
    path: Path,
    gpus: str = "{a100-40g: 2}",
    models: str = "{name: a, model: llama-1b, rate: 2}",
    more: str = "",
):
    path.write_text(f"gpus: {gpus}\nprompt_tokens: 64\noutput_tokens: 16\n{more}\nmodels: [{models}]\n")
    return str(path)


def test_plan_prints_groups_and_commands_that_quire_reads(tmp_path, capsys):
    models = "{name: a, model: llama-7b, rate: 6, cv: 3}, {name: b, model: llama-7b, rate: 6, cv: 3, slo_request: 1s}"
    path = write(tmp_path / "fleet.yaml", models=models)
    assert main(["plan", "--fleet", path]) == 0
    text = capsys.readouterr().out
    assert "of requests in time (simulated); one model per GPU" in text
    assert main(["plan", "--fleet", path, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["models"][1]["deadline_s"] == 1.0
    assert {name for group in record["groups"] for name in group["models"]} == {"a", "b"}
    shares = dict.fromkeys(range(2), 0.0)
    for command in record["commands"]:
        assert command in text
        visible, *words = shlex.split(command, comments=True)
        if visible.startswith("CUDA_VISIBLE_DEVICES="):
            assert words[:3] == ["quire", "serve", "llama-7b"]
            share = float(words[words.index("--gpu-memory-utilization") + 1])
            for device in visible.partition("=")[2].split(","):
                shares[int(device)] += share
    assert all(0 < share <= 0.9 for share in shares.values())


def test_names_are_quoted_in_commands(tmp_path, capsys):
    assert (
        main(
            [
                "plan",
                "--fleet",
                write(tmp_path / "fleet.yaml", models="{name: a b; ls, model: llama-1b, rate: 2}"),
                "--json",
            ]
        )
        == 0
    )
    command = shlex.split(json.loads(capsys.readouterr().out)["commands"][0])
    assert command[command.index("--served-model-name") + 1] == "a b; ls"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": "{name: a, model: llama-1b, rate: 0}"}, "rate is 0: give requests per second above 0"),
        ({"models": "{name: a, model: llama-1b, rate: -1}"}, "rate is -1"),
        ({"models": "{name: a, model: llama-1b, rate: .inf}"}, "rate is inf"),
        ({"models": "{name: a, model: llama-1b, rate: .nan}"}, "rate is nan"),
        ({"models": "{name: a, model: llama-1b}"}, "give `rate`"),
        ({"models": "{name: a, model: llama-1b, rate: 1, cv: 0}"}, "cv is 0: give a number from 0.1 to 20"),
        ({"models": "{name: a, model: llama-1b, rate: 1, users: 3}"}, "'users' is not a field"),
        ({"models": "{name: a, model: llama-1b, rate: 1, slo_request: 1ms}"}, "give at least 0."),
        ({"models": "{name: a, model: lama-1b, rate: 1}"}, "(nearest: llama-1b)"),
        ({"models": "{name: a, model: llama-70b, rate: 1}"}, "4 × a100-40g would hold it"),
        ({"models": "{name: a, model: opt-30b, rate: 1}"}, "cannot be cut into ranks and needs"),
        ({"models": "{name: a, model: flan-t5-small, rate: 1}"}, "has an encoder"),
        (
            {"models": "{name: a, model: llama-1b, rate: 1, settings: {max_model_len: 64}}"},
            "prompt_tokens + output_tokens is 80 and the context has 64 tokens: give shorter ones",
        ),
        (
            {"models": "{name: a, model: llama-1b, rate: 1, settings: {quantization: fp8}}"},
            "a100-40g: quantization='fp8' needs a GPU with float8 matrix units",
        ),
        (
            {"models": "{name: a, model: llama-1b, rate: 1, settings: {max_num_seqs: 4}}"},
            "max_num_seqs is 4: leave it to the plan",
        ),
        ({"gpus": "{a100-40: 2}"}, "'a100-40' is not known: choose from a100-40g"),
        ({"gpus": "{h200: 0}"}, "gpus: h200 is 0: give a whole number from 1"),
        ({"gpus": "h200"}, "such as {h200: 8}"),
        ({"more": "max_tp: 0"}, "max_tp is 0"),
        ({"more": "slo_scale: 0.5"}, "slo_scale is 0.5: give a number from 1"),
    ],
)
def test_bad_input_is_one_line_with_what_works(tmp_path, capsys, change, message):
    assert main(["plan", "--fleet", write(tmp_path / "fleet.yaml", **change)]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_without_the_laboratory_the_plan_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(laboratory, "is_installed", lambda: False)
    assert main(["plan", "--fleet", write(tmp_path / "fleet.yaml")]) != 0
    assert "pip install 'quire[lab]'" in capsys.readouterr().err


def test_write_is_for_slices(tmp_path, capsys):
    path = write(tmp_path / "fleet.yaml")
    assert main(["plan", "--fleet", path, "--write", str(tmp_path)]) != 0
    assert "--write is for slices" in capsys.readouterr().err


def test_the_motivating_ratios_are_those_of_the_paper_and_the_report_has_both(tmp_path):
    pytest.importorskip("matplotlib")
    finding = placement.run(Setup(Size.QUICK, 0, {}, DataFolder(None), Counted().opened, 1.0))
    ratios = {run["arrivals"]: run for run in finding.results["examples"] if run["overhead"] == 0}
    for arrivals in placement.EXAMPLES:
        run = ratios[arrivals.name]
        assert run["published"] == arrivals.published
        assert run["ratio"] == pytest.approx(arrivals.published, rel=arrivals.tolerance)
    assert all(check.held for check in finding.checks)
    done = write_finding(placement.EXPERIMENT, finding, 1.0, tmp_path)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in done.pictures)
    assert json.loads((tmp_path / "placement.json").read_text())["results"]["curves"]
