"""AdmissionPolicy: when waiting groups may join the running batch. Continuous batching, and the hooks for others."""

from collections.abc import Sequence as Listed

from quire.core.request import Sequence
from quire.scheduler.plan import StepPlan
from quire.scheduler.queue import WaitingQueue


class AdmissionPolicy:
    """Continuous batching (Orca's iteration-level scheduling): waiting groups join at every step, and the row of a
    finished sequence is free at once. Other policies override these hooks.
    """

    kept: Listed[Sequence] = ()  # finished sequences that still hold their rows and blocks

    def room(self, waiting: WaitingQueue, running: Listed[Sequence]) -> int:
        """The number of waiting groups that may be admitted in this step, rows and memory permitting."""
        return len(waiting)

    def admitted(self, num_groups: int, is_full: bool) -> None:
        """Called after each step's admission. `is_full`: the next waiting group does not fit, or none waits."""

    def keep(self, sequence: Sequence) -> bool:
        """Whether a sequence that finishes keeps its row and blocks until `release` returns it."""
        return False

    def release(
        self, waiting: WaitingQueue, running: Listed[Sequence], request_id: str | None = None
    ) -> Listed[Sequence]:
        """Kept sequences that are to be freed now: of an aborted request, or of a batch that is over."""
        return ()

    def extend(self, plan: StepPlan, num_tokens: int) -> None:
        """Adds kept sequences to a step that has `num_tokens` left."""

    def wait(self, waiting: WaitingQueue) -> None:
        """Called when the engine is idle: a policy that delays a batch waits a moment here."""
