"""Planned: a step with those who are in it. SchedulerStats: what was decided so far, in numbers."""

from dataclasses import dataclass

from quire.core.request import Sequence
from quire.core.step import Step


@dataclass(slots=True)
class SchedulerStats:
    num_steps: int = 0
    num_preemptions: int = 0
    num_swaps_out: int = 0  # of these, requests whose blocks went to host memory
    num_swaps_in: int = 0
    num_admissions: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step, and who is in it: what commit needs once the result is there."""

    step: Step
    sequences: list[Sequence]  # as step.rows
    receivers: list[Sequence]  # as step.sample_rows
