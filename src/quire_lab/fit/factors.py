"""Fits a cost model to measured steps: non-negative least squares on relative errors, and what it is worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.bench.report import percentile
from quire.core.errors import ConfigError
from quire_lab.simulate.cost_model import (
    FACTOR_NAMES,
    CostModel,
    Factors,
    ModelNumbers,
    Rates,
    StepCounts,
    ideal_terms,
)

WEIGHTS, PRODUCTS = FACTOR_NAMES.index("weights"), FACTOR_NAMES.index("products")
# nothing beats the data sheet where a device's own memory or its units set the pace; activations may stay in caches
LEAST = np.array(
    [1.0 if name in ("weights", "products", "kv", "attention") else 0.0 for name in FACTOR_NAMES]
)
MAX_ROUNDS = 50
DISTURBED = 3.0  # times what the others make of it: a kernel was compiled, or something else ran
FOLDS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """Steps of one model that took so long together: a single step, or a whole run of which only the end was timed."""

    what: str
    model: ModelNumbers
    counts: Sequence[StepCounts]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Errors are relative, |charged − measured| / measured, in the order of the samples."""

    factors: Factors
    samples: Sequence[Sample]  # that were fitted to
    left_out: Sequence[Sample]  # that took so long that something else must have happened
    errors: Sequence[float]  # of the fit on all samples
    held_out: Sequence[float]  # of each sample, by a fit that did not see it

    def summary(self) -> dict[str, float]:
        fitted, held_out = sorted(self.errors), sorted(self.held_out)
        return {
            "num_samples": len(fitted),
            "num_left_out": len(self.left_out),
            "median_error": percentile(fitted, 50),
            "p90_error": percentile(fitted, 90),
            "held_out_median_error": percentile(held_out, 50),
            "held_out_p90_error": percentile(held_out, 90),
        }


def fit_factors(rates: Rates, samples: Sequence[Sample], by_data_sheet: bool = True) -> Fit:
    """Held out are every fifth sample in turn, or each alone where there are few.

    Rates of a data sheet cannot be beaten; measured ones can, since another kernel may be faster. Samples that took
    several times what the fit makes of them are left out, and said.
    """
    least = LEAST if by_data_sheet else np.zeros(len(FACTOR_NAMES))
    if len(samples) < len(FACTOR_NAMES):
        raise ConfigError(
            f"{len(samples)} measured samples cannot fit {len(FACTOR_NAMES)} factors: measure more of them"
        )
    tables = [_table(rates, sample) for sample in samples]
    seconds = np.array([sample.seconds for sample in samples])
    everything = np.arange(len(samples))
    factors = _solve(tables, seconds, everything, least)
    charged = np.array([(_bounded(table, factors) @ factors).sum() for table in tables])
    disturbed = seconds > DISTURBED * charged
    if disturbed.any() and (~disturbed).sum() >= len(FACTOR_NAMES):
        kept = [sample for sample, is_out in zip(samples, disturbed, strict=True) if not is_out]
        left_out = [sample for sample, is_out in zip(samples, disturbed, strict=True) if is_out]
        again = fit_factors(rates, kept, by_data_sheet)
        return replace(again, left_out=[*left_out, *again.left_out])
    num_folds = len(samples) if len(samples) < 8 * FOLDS else FOLDS
    held_out = np.zeros(len(samples))
    for fold in range(num_folds):
        left_out = everything % num_folds == fold
        others = _solve(tables, seconds, everything[~left_out], least)
        held_out[left_out] = _errors(tables, seconds, everything[left_out], others)
    return Fit(
        Factors(*factors.tolist()),
        samples,
        (),
        _errors(tables, seconds, everything, factors).tolist(),
        held_out.tolist(),
    )


def charged_errors(rates: Rates, factors: Factors, samples: Sequence[Sample]) -> list[float]:
    """Relative errors, with their sign, on samples that need not be the fit's: more than 0 is charged too much."""
    return [
        sum(CostModel(rates, factors, one.model).seconds(counts) for counts in one.counts) / one.seconds - 1.0
        for one in samples
    ]


def _table(rates: Rates, sample: Sample) -> np.ndarray:
    """[steps, factors]: what each factor multiplies."""
    return np.array([ideal_terms(rates, sample.model, counts) for counts in sample.counts])


def _solve(
    tables: list[np.ndarray], seconds: np.ndarray, chosen: np.ndarray, least: np.ndarray
) -> np.ndarray:
    """Which of weights and products bounds a step depends on the factors: solve, look again, until nothing changes."""
    factors = LEAST
    before = None
    for _ in range(MAX_ROUNDS):
        rows = np.array([_bounded(tables[i], factors).sum(axis=0) for i in chosen])
        if before is not None and np.allclose(rows, before, rtol=1e-9):
            break
        before = rows
        scaled = rows / seconds[chosen, None]
        factors = least + nonnegative_least_squares(scaled, 1.0 - scaled @ least)
    return factors


def _bounded(table: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The slower of weights and products stays, the other hides behind it."""
    bounded = table.copy()
    by_memory = table[:, WEIGHTS] * factors[WEIGHTS] >= table[:, PRODUCTS] * factors[PRODUCTS]
    bounded[by_memory, PRODUCTS] = 0.0
    bounded[~by_memory, WEIGHTS] = 0.0
    return bounded


def _errors(
    tables: list[np.ndarray], seconds: np.ndarray, chosen: np.ndarray, factors: np.ndarray
) -> np.ndarray:
    charged = np.array([(_bounded(tables[i], factors) @ factors).sum() for i in chosen])
    return np.abs(charged - seconds[chosen]) / seconds[chosen]


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x ≥ 0 that brings matrix · x nearest to target, by Lawson and Hanson's active sets."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale
    num_columns = scaled.shape[1]
    solution, free = np.zeros(num_columns), np.zeros(num_columns, dtype=bool)
    for _ in range(10 * num_columns):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= 1e-10:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num_columns)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0.0)
            if not negative.any():
                solution = trial
                break
            steps = solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300)
            solution = solution + steps.min() * (trial - solution)
            free &= solution > 1e-12
            solution[~free] = 0.0
    return solution / scale
