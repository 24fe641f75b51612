"""Curves of latency against request rate, around what each policy serves when there is always somebody waiting."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire_lab.experiments.simulated import Point, Run, simulate

FRACTIONS = (0.6, 0.9, 1.15)  # of the sustained rate


@dataclass(frozen=True, slots=True)
class CurveJob:
    """One line of a figure: a policy over rates, which are set here. No fractions: the sustained rate alone."""

    workload: str
    policy: str
    run: Run
    fractions: Sequence[float] = FRACTIONS


@dataclass(frozen=True, slots=True)
class Curve:
    workload: str
    policy: str
    method: str
    width: int
    at_once: Point  # every request at the start
    points: Sequence[Point]  # by rate

    @property
    def sustained(self) -> float:
        """Requests per second: what is served while the queue is never empty. Beyond it latency grows without end."""
        return self.at_once.capacity

    def as_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "policy": self.policy,
            "method": self.method,
            "width": self.width,
            "sustained_rate": self.sustained,
            "running_when_full": self.at_once.mean_full,
            "points": [
                {"rate": one.rate, "normalised_latency": one.normalised, "mean_running": one.mean_running}
                for one in self.points
            ],
        }


def trace_curve(job: CurveJob) -> Curve:
    """All at once first, which says where to look."""
    run = job.run
    at_once = simulate(replace(run, rate=math.inf))
    points = [simulate(replace(run, rate=fraction * at_once.capacity)) for fraction in job.fractions]
    return Curve(job.workload, job.policy, run.method, run.width, at_once, points)


def ratio(curves: Mapping[str, Curve], over: str, of: str = "paged") -> float:
    """Of sustained rates."""
    return curves[of].sustained / curves[over].sustained
