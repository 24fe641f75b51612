"""A share of a GPU's SMs: its rates, and the fit of their curve to measured steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire_lab.fit.sm_shares import (
    TESTED,
    SharedStep,
    SharePredictor,
    error_table,
    fit_curve,
    read_steps,
    shape_of,
)
from quire_lab.simulate.cost_model import StepCounts
from quire_lab.simulate.devices import SHARE_CURVE, ShareCurve, find_device

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_gpu_sharing.json"
DECODE = [StepCounts(16, 16, 16, 16 * 512, 16 * 512.0)]
PROMPT = [StepCounts(1, 2048, 1, 2048, 2048 * 1024.5, num_starts=1)]


def test_a_share_reads_and_computes_more_than_its_part_and_all_sms_have_all():
    whole = find_device("simulated:h200").rates
    assert SHARE_CURVE.rates(whole, 1.0) == whole
    for percent in (10, 29, 50):
        rates = find_device(f"simulated:h200-sm{percent}").rates
        assert percent / 100 < rates.flops / whole.flops < rates.bandwidth / whole.bandwidth < 1


def test_the_curve_is_fitted_to_the_shares_that_are_not_tested():
    predictor, true = SharePredictor(shape_of("llama8b", 4)), ShareCurve(reads=2.7, computes=1.1)
    steps = [
        SharedStep(percent, percent / 100, what, counts, seconds=1.0)
        for percent in (10, 20, 50, 75, *TESTED)
        for what, counts in (("16 decodes at 512", DECODE), ("1 prompts of 2048", PROMPT))
    ]
    steps = [replace(step, seconds=predictor.seconds(step, true)) for step in steps]
    wrong = [replace(step, seconds=2.0) if step.percent in TESTED else step for step in steps]
    for measured in (steps, wrong):
        curve = fit_curve(predictor, measured)
        assert (curve.reads, curve.computes) == pytest.approx((2.7, 1.1), abs=0.02)


def test_steps_under_mps_with_sms_that_cublas_cannot_use_are_marked_and_not_tested():
    shape, steps = read_steps(json.loads(RECORD.read_text()))
    lines = error_table(SharePredictor(shape), steps, SHARE_CURVE).splitlines()
    void = [line for line in lines if line.endswith("MPS with 18 SMs: cuBLAS check fails")]
    assert [line.split()[0] for line in void] == ["14"] * 3
    tested = {line.split()[0] for line in lines if line.endswith("tested: holds")}
    assert tested == {"29", "43", "57"}  # 43 % are 56 SMs, too, but of a green context


def test_the_curve_is_not_fitted_to_steps_that_show_nothing():
    shape, steps = read_steps(json.loads(RECORD.read_text()))
    predictor = SharePredictor(shape)
    wrong = [replace(step, percent=15, seconds=1e-3) for step in steps if step.void]
    assert fit_curve(predictor, [*steps, *wrong]) == fit_curve(predictor, steps)
