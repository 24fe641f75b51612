"""Fitting the cost model: known factors are found again, and measured steps can be read."""

import json
import random

import numpy as np
import pytest

from quire.bench.drive import Bench
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import build
from quire_lab.fit.factors import Sample, charged_errors, fit_factors, nonnegative_least_squares
from quire_lab.fit.samples import read_samples
from quire_lab.fit.step_grid import StepCell, measure_grid
from quire_lab.simulate.cost_model import CostModel, Factors, ModelNumbers, Rates, StepCounts

RATES = Rates(bandwidth=1e12, flops=1e14)
TRUE = Factors(2e-4, 1e-5, 3e-6, 2e-5, 1.2, 1.6, 1.4, 2.5, 20.0, 3.0)
MODELS = (
    ModelNumbers(32, 4096, 32000, 4096, 13_000_000_000, 6_400_000_000, 131_000_000, 524_288, 8_388_608, 2),
    ModelNumbers(12, 768, 50272, 768, 250_000_000, 86_000_000, 38_000_000, 36_864, 589_824, 2),
)


def steps(noise):
    chance = random.Random(0)
    for index in range(120):
        rows = chance.choice((1, 4, 16, 64, 128))
        new = chance.choice((1, 1, 64, 256))
        context = rows * chance.randint(new, 2000)
        counts = StepCounts(rows, rows * new, rows, context, context * new, rows if new > 1 else 0)
        model = MODELS[index % 2]
        seconds = CostModel(RATES, TRUE, model).seconds(counts) * chance.uniform(1 - noise, 1 + noise)
        yield Sample(f"step {index}", model, [counts], seconds)


def test_the_factors_that_made_the_times_are_found_again():
    fit = fit_factors(RATES, list(steps(noise=0.0)))
    assert list(fit.factors.as_dict().values()) == pytest.approx(list(TRUE.as_dict().values()), rel=1e-3)
    assert max(fit.held_out) < 1e-6


def test_noise_shows_as_error_on_what_was_held_out():
    summary = fit_factors(RATES, list(steps(noise=0.1))).summary()
    assert 0.02 < summary["held_out_median_error"] < 0.1
    assert summary["held_out_p90_error"] < 0.2


def test_samples_that_were_not_fitted_to_can_be_foretold():
    samples = list(steps(noise=0.0))
    factors = fit_factors(RATES, samples[:60]).factors
    slower = [Sample(one.what, one.model, one.counts, one.seconds * 2) for one in samples[60:]]
    assert charged_errors(RATES, factors, slower) == pytest.approx([-0.5] * 60, abs=0.01)


def test_nothing_beats_the_data_sheet():
    fast = [Sample(one.what, one.model, one.counts, one.seconds / 3) for one in steps(noise=0.0)]
    assert fit_factors(RATES, fast).factors.weights >= 1.0
    assert fit_factors(RATES, fast, by_data_sheet=False).factors.weights == pytest.approx(0.4, rel=1e-2)


def test_a_step_that_was_held_up_is_left_out_and_named():
    samples = list(steps(noise=0.0))
    held_up = Sample("compiled", samples[7].model, samples[7].counts, 50 * samples[7].seconds)
    fit = fit_factors(RATES, [*samples, held_up])
    assert [one.what for one in fit.left_out] == ["compiled"]
    assert fit.summary()["num_left_out"] == 1
    assert max(fit.errors) < 1e-6


def test_least_squares_stay_at_zero_where_less_would_be_nearer():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative_least_squares(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_too_few_samples_are_refused():
    with pytest.raises(ConfigError, match="measure more"):
        fit_factors(RATES, list(steps(0.0))[:5])


def test_a_file_of_steps_is_fitted_as_well_as_what_was_measured(tmp_path):
    built = build(EngineConfig.of(model="opt-125m", device="simulated:h200", enable_prefix_caching=False))
    cells = [StepCell(n, context, 4) for n in (1, 8, 32) for context in (16, 300)] + [StepCell(4, 100_000)]
    measured = measure_grid(Bench(built), cells)
    # prompts and decodes of all but the cell that does not fit
    assert len({one.what for one in measured}) >= 10
    runs = [{"model": "opt-125m", "steps": [one.as_dict() for one in measured]}]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"machine": "a dream", "date": "2026-01-01", "runs": runs}))
    found = read_samples(str(path), "h200")
    assert found.on == "a dream"
    assert max(fit_factors(built.engine._runner._real._cost._rates, found.samples).errors) < 1e-3


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 1}', '[{"shape": "llama9b"}]'])
def test_a_file_without_measurements_is_refused(tmp_path, text):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"steps\.json"):
        read_samples(str(path), "h200")
