"""What the simulated experiments make of their runs: checks, tables and pictures, from runs that are made up here."""

import json
import math

import pytest

from quire.bench.lab import batched, characterize, rate, trace
from quire.bench.lab.characterize_grid import Measured, cells
from quire.bench.lab.rate_curves import Curve
from quire.bench.lab.report import write_finding
from quire.bench.lab.simulated import PAPER, Point, Workload
from quire.bench.lengths import Lengths

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
    return Curve(
        name, policy, method, width, point(WORTH[policy]), [point(WORTH[policy], at) for at in (0.6, 1.2)]
    )


@pytest.mark.parametrize("held", [True, False])
def test_rate_says_whether_the_order_held(setup, tmp_path, held):
    plain = {name: {policy: curve(name, policy) for policy in lines} for name, lines in rate.LINES.items()}
    if not held:
        plain["sharegpt"]["paged"] = curve("sharegpt", "max")
    wide = {
        (method, width): {policy: curve("alpaca", policy, method, width) for policy in rate.WIDE}
        for method in rate.METHODS
        for width in rate.WIDTHS
    }
    finding = rate._finding(setup, PAPER, WORKLOADS, plain, wide)
    assert finding.checks[0].held == held
    text = written(rate, finding, tmp_path)
    assert "alpaca, 4 beams: paged over pow2" in text


def test_characterize_names_what_does_not_fit(setup, tmp_path):
    worth = {"paged": 8.0, "unpaged": 4.0, "dynamic": 2.0, "none": 1.0}
    found = [
        Measured(
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
    assert "does not fit" in written(characterize, finding, tmp_path)
    assert any(math.isinf(one.cell.rate) for one in found)


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
