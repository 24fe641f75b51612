"""What an engine on a share of the SMs gets of a GPU's bandwidth and FLOP/s:
`python -m quire_lab.fit.sm_shares RECORD.json`, of a record of `gpu_sharing --modes steps`.

Fits the two exponents of `ShareCurve` to the steps at calibration shares, and prints the errors at every share. Steps
at the tested shares are predicted only. Steps under MPS with a number of SMs at which cuBLAS leaves parts of products
unwritten are printed, but neither fitted nor tested. A simulated GPU takes the exponents from simulate/devices.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.table import aligned
from quire.core.config import EngineConfig
from quire.models import registry
from quire_lab.benchmarks import workloads
from quire_lab.simulate.build import model_costs, open_shape, simulated_parts
from quire_lab.simulate.cost_model import CostModel, ModelNumbers, StepCounts
from quire_lab.simulate.devices import SHARE_CURVE, ShareCurve, SimulatedDevice

TESTED = (14, 29, 43, 57)  # percent of the SMs
# Of an H200, under MPS: `quire.kernels.sm_share.check_products` refuses them. Older records have steps with them.
UNWRITTEN_SMS = (18, 56, 98, 104, 112)
LIMITS = {"decodes": 0.15, "prompts": 0.20}  # of the errors there
GRID = [exponent / 100 for exponent in range(50, 600)]


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A measured step of an engine on a share of the SMs."""

    percent: int  # that was asked for
    share: float  # that the engine had: green contexts have whole groups of SMs
    what: str
    counts: Sequence[StepCounts]
    seconds: float
    void: str = ""  # why the time shows nothing

    @property
    def kind(self) -> str:
        return "prompts" if "prompt" in self.what else "decodes"


def shape_of(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """A published architecture; with fewer layers, where they are given."""
    shape = workloads.SHAPES[name]
    return shape | {"num_hidden_layers": num_layers} if num_layers else shape


class SharePredictor:
    """Seconds of a model's steps on a GPU of which an engine has a share."""

    def __init__(self, shape: Mapping[str, Any], device: str = "simulated:h200") -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape))
            config = EngineConfig.of(model=folder, load_format="dummy", device=device)
            model = registry.describe(open_shape(config).config)
            parts = simulated_parts(config, model, ())
        self._device: SimulatedDevice = parts.device
        self._model: ModelNumbers = model_costs(model, parts.precision, 16)

    def seconds(self, step: SharedStep, curve: ShareCurve = SHARE_CURVE) -> float:
        rates = curve.rates(self._device.rates, step.share)
        cost = CostModel(rates, self._device.factors, self._model)
        return sum(cost.seconds(counts) for counts in step.counts)

    def error(self, step: SharedStep, curve: ShareCurve = SHARE_CURVE) -> float:
        return self.seconds(step, curve) / step.seconds - 1


def fit_curve(predictor: SharePredictor, steps: Sequence[SharedStep]) -> ShareCurve:
    """The least sum of squared relative errors at shares that are not tested; one exponent after the other."""
    calibration = [step for step in steps if step.percent not in TESTED and not step.void]
    curve = SHARE_CURVE
    for _ in range(4):
        tried = [ShareCurve(reads, curve.computes) for reads in GRID]
        curve = min(tried, key=lambda one: _squares(predictor, calibration, one))
        tried = [ShareCurve(curve.reads, computes) for computes in GRID]
        curve = min(tried, key=lambda one: _squares(predictor, calibration, one))
    return curve


def _squares(predictor: SharePredictor, steps: Sequence[SharedStep], curve: ShareCurve) -> float:
    return sum(predictor.error(step, curve) ** 2 for step in steps)


def read_steps(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[SharedStep]]:
    """The model's shape, and the measured steps, of a record's rows."""
    rows = [row for row in rows if row["mode"] == "steps" and "steps" in row]
    if not rows:
        raise SystemExit("the record has no measured steps: run gpu_sharing --modes steps")
    whole = max(row["num_sms"] for row in rows)
    steps = []
    for row in rows:
        for step in row["steps"]:
            counts = [StepCounts(**count) for count in step["counts"]]
            share = row["num_sms"] / whole
            steps.append(
                SharedStep(row["percent"], share, step["what"], counts, step["seconds"], void_by_mps(row))
            )
    return shape_of(rows[0]["shape"], rows[0]["layers"]), steps


def void_by_mps(row: Mapping[str, Any]) -> str:
    """A product that is not written to its end takes less time: such a step is no measurement."""
    if "(MPS" not in row["where"] or row["num_sms"] not in UNWRITTEN_SMS:
        return ""
    return f"MPS with {row['num_sms']} SMs: cuBLAS check fails"


def error_table(predictor: SharePredictor, steps: Sequence[SharedStep], curve: ShareCurve) -> str:
    lines = [["% of SMs", "step", "measured, ms", "predicted, ms", "error", ""]]
    for step in sorted(steps, key=lambda step: (step.what, step.percent)):
        error = predictor.error(step, curve)
        words = step.void
        if step.percent in TESTED and not step.void:
            words = "tested: " + ("holds" if abs(error) <= LIMITS[step.kind] else "too far off")
        lines.append(
            [
                str(step.percent),
                step.what,
                f"{1e3 * step.seconds:.2f}",
                f"{1e3 * predictor.seconds(step, curve):.2f}",
                f"{100 * error:+.1f} %",
                words,
            ]
        )
    return aligned(lines, right=(0, 2, 3, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    shape, steps = read_steps(json.loads(parser.parse_args().record.read_text()))
    predictor = SharePredictor(shape)
    fitted = fit_curve(predictor, steps)
    print(f"now, {SHARE_CURVE}:\n{error_table(predictor, steps, SHARE_CURVE)}\n")
    print(f"fitted to the shares that are not tested, {fitted}:\n{error_table(predictor, steps, fitted)}")
    if fitted != SHARE_CURVE:
        print(
            f"\nto take it: SHARE_CURVE = ShareCurve(reads={fitted.reads:.2f}, computes={fitted.computes:.2f}) "
            "in simulate/devices/__init__.py"
        )


if __name__ == "__main__":
    main()
