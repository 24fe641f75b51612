"""Curves through measured points."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Power:
    """y = scale · x ** exponent"""

    exponent: float
    scale: float
    r_squared: float  # of the logarithms

    def at(self, x: float) -> float:
        return self.scale * x**self.exponent


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope · x"""

    intercept: float
    slope: float
    r_squared: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit_power(x: Sequence[float], y: Sequence[float]) -> Power:
    """Least squares in the logarithms, so that every decade counts alike."""
    line = fit_line(np.log(np.asarray(x)).tolist(), np.log(np.asarray(y)).tolist())
    return Power(line.slope, float(np.exp(line.intercept)), line.r_squared)


def fit_line(x: Sequence[float], y: Sequence[float], weights: Sequence[float] | None = None) -> Line:
    """Weighted least squares; with weights 1/y every point's relative error counts alike."""
    known, found = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    weight = np.ones_like(found) if weights is None else np.asarray(weights, dtype=float)
    slope, intercept = np.polyfit(known, found, 1, w=weight)
    residual = found - (intercept + slope * known)
    spread = found - np.average(found, weights=weight)
    total = float((weight * spread**2).sum())
    explained = 1.0 - float((weight * residual**2).sum()) / total if total else 1.0
    return Line(float(intercept), float(slope), explained)
