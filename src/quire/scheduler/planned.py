"""ScheduledStep: a step with its sequences."""

from dataclasses import dataclass

from quire.core.request import Sequence
from quire.core.step import Step


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step, and who is in it: what commit needs once the result is there."""

    step: Step
    sequences: list[Sequence]  # as step.rows
    receivers: list[Sequence]  # as step.sample_rows
