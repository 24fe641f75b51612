"""What the simulated experiments make of their runs: checks, tables and pictures, from runs that are made up here."""

import json
import math
from dataclasses import replace

import pytest

from quire.bench.workload import Lengths
from quire_lab.experiments import adapters, adapters_simulated, batched, characterize, rate, trace
from quire_lab.experiments.characterize import INPUT, GridCell, GridJob, GridResult, cells, gains, measure
from quire_lab.experiments.rate import Curve
from quire_lab.measure.simulated_runs import PAPER, Point, Workload
from quire_lab.report.experiment import Size
from quire_lab.report.files import write_finding

pytest.importorskip("matplotlib")
WORKLOADS = [
    Workload(name, f"{name}: made up", [Lengths(10, 20)]) for name in ("sharegpt", "alpaca", "chatbot")
]
WORTH = {"max": 1.0, "pow2": 2.0, "oracle": 3.0, "paged": 6.0, "ft": 0.5, "static": 1.5, "dynamic": 1.5}


def point(worth, at=1.0):
    return Point(at, 0.02 * at / worth, 7 * worth, 7 * worth, worth, 100 * worth, 0, 0, 10, 1.0)


def written(module, finding, folder):
    done = write_finding(module.EXPERIMENT, finding, 1.0, folder)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in done.pictures)
    assert json.loads((folder / f"{module.EXPERIMENT.name}.json").read_text())["results"]
    text = (folder / f"{module.EXPERIMENT.name}.txt").read_text()
    for needed in ("simulated:", "held out", "no cost factor was fitted"):
        assert needed in text
    return text


def test_batched_sets_its_ratios_beside_the_published_ones(setup, tmp_path):
    found = {
        name: {policy: point(WORTH[policy]) for policy in batched.RESERVATIONS}
        for name in ("sharegpt", "alpaca")
    }
    text = written(batched, batched._finding(setup, PAPER, WORKLOADS[:2], found, found), tmp_path)
    assert "6.0 times as many (published: 4.3 times)" in text
    assert "30.42" in text


def curve(name, policy, method="one", width=1):
    """Paging is worth more with every sequence that it shares blocks between."""
    worth = WORTH[policy] * (1 + 0.1 * (width - 1) * (policy == "paged"))
    return Curve(name, policy, method, width, point(worth), [point(worth, at) for at in (0.6, 1.2)])


@pytest.mark.parametrize("held", [True, False])
def test_rate_says_whether_the_order_held(setup, tmp_path, held):
    plain = {name: {policy: curve(name, policy) for policy in rate.LABELS} for name in rate.NAMES}
    if not held:
        plain["sharegpt"]["paged"] = curve("sharegpt", "max")
    wide = {
        (method, width): {policy: curve("alpaca", policy, method, width) for policy in rate.WIDE}
        for method in rate.METHODS
        for width in rate.WIDTHS
    }
    if not held:
        wide["beam", 4]["paged"] = curve("alpaca", "paged", "beam", 2)
    finding = rate._finding(setup, PAPER, WORKLOADS, plain, wide)
    assert finding.checks[0].held == held
    assert finding.checks[-1].held == held
    assert len(finding.results["curves"]) == 3 * 7
    text = written(rate, finding, tmp_path)
    assert "alpaca, 4 beams: paged over pow2" in text


def test_characterize_names_what_does_not_fit(setup, tmp_path):
    worth = {"paged": 8.0, "unpaged": 4.0, "dynamic": 2.0, "none": 1.0}
    found = [
        GridResult(
            cell,
            100 * worth[cell.batching],
            0.1,
            0.02,
            5.0,
            fault="too large" * (cell.device.endswith("v100")),
        )
        for cell in cells(setup.size, characterize.BASE)
    ]
    finding = characterize._finding(setup, characterize.BASE, found, 60)
    assert finding.checks[0].held
    text = written(characterize, finding, tmp_path)
    assert "does not fit" in text
    assert "At most it gives 2.0 ×" in text
    assert "published: up to 4 ×" in text
    assert not any("v100" in gain.in_words for gain in gains(found, "unpaged"))
    assert {one["over"] for one in finding.results["largest"]} == {"unpaged", "dynamic", "none"}
    assert any(math.isinf(one.cell.rate) for one in found)


def test_characterize_gives_paged_and_reserved_memory_the_same_bytes():
    """Two requests of 2,048 reserved positions fill 256 blocks of 16, where six of the tokens themselves fit."""
    paged, unpaged = (
        measure(
            GridJob(
                GridCell("blocks", "opt-6.7b", "simulated:a100-40g", batching, 64, math.inf, 256),
                characterize.BASE,
                12,
                0,
            )
        )
        for batching in ("paged", "unpaged")
    )
    assert unpaged.mean_running <= 2.0 < paged.mean_running <= 256 * 16 / INPUT
    assert paged.output_rate > 1.5 * unpaged.output_rate


@pytest.mark.parametrize(
    ("good", "words"), [(1.0, "Up to 4 × the trace's speed"), (0.1, "at none of the speeds")]
)
def test_trace_says_up_to_where_the_level_was_held(setup, tmp_path, good, words):
    levels = [
        trace.Level(speed, 5 * speed, 0.1, 0.5, 0.01, 0.02, share, share, share, 900.0, 0, 0)
        for speed, share in ((1.0, good), (4.0, 0.97 * good), (8.0, 0.2 * good))
    ]
    loaded = trace.load_trace(setup.data, 20, 0)
    assert words in written(trace, trace._finding(setup, trace.BASE, loaded, levels), tmp_path)


ADAPTERS_WORTH = {"unified": 8.0, "separate": 7.0, "merge": 1.0, "merge, static": 0.5}


@pytest.mark.parametrize("size", [Size.QUICK, Size.NORMAL])
def test_adapters_set_their_ratios_beside_the_published_ones(setup, tmp_path, monkeypatch, size):
    simulated = [
        adapters_simulated.Simulated(case, ADAPTERS_WORTH[case.mode], 100.0, 0.1, 0.9, 20.0, 10, 0, 0)
        for case in adapters_simulated.cases(size)
    ]
    settings = adapters_simulated.BASE
    monkeypatch.setattr(adapters, "simulate_adapters", lambda _: (simulated, settings, (600, 150)))
    finding = adapters.run(replace(setup, size=size, engine={"device": settings["device"]}))
    assert all(check.held for check in finding.checks)
    text = written(adapters, finding, tmp_path)
    for needed in ("16.0  30.4 over PEFT", "up to 4", "fitted on NVIDIA H200", "assumed, not fitted"):
        assert needed in text
    assert "served" not in finding.results  # whoever simulates has nothing measured on this machine


def test_a_simulated_run_with_adapters_serves_all_and_says_how():
    case = adapters_simulated.SimulatedCase("unified", 100, adapters_simulated.MIXED)
    one = adapters_simulated.simulate(adapters_simulated.SimulatedJob(case, adapters_simulated.BASE, 12, 0))
    assert one.attained == 1.0
    assert one.loads > 1
    assert one.requests_per_second > 0.0
