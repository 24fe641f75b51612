"""FinishedRows: sequences that have ended and keep their rows, as static batching has it."""

from quire.core.request import Sequence
from quire.scheduler.plan import StepPlan


class FinishedRows:
    """They hold row and memory until their batch is over, and compute as long as the others do.

    Each computes its last position again: the same weights, the same attention, the same memory as a decode, with
    the same K and V as a result. What is sampled is discarded. (Systems that pad let such rows grow instead, which
    costs a little more: static batching is not made to look worse here than it is.)
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.num_tokens = 0  # computed for nobody, so far

    def __len__(self) -> int:
        return len(self.sequences)

    def keep(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)

    def take(self, request_id: str | None = None) -> list[Sequence]:
        """Those of a request, or all: they are kept no longer."""
        taken = [s for s in self.sequences if request_id in (None, s.request.request_id)]
        self.sequences = [s for s in self.sequences if request_id not in (None, s.request.request_id)]
        return taken

    def compute(self, plan: StepPlan, budget: int) -> None:
        """Adds them to a plan that has so many tokens left: those that live come first."""
        for sequence in self.sequences[: max(0, budget)]:
            sequence.num_computed -= 1  # the plan's step brings it back
            if not sequence.is_beam:  # whose candidates would be compared with others'
                plan.sample(len(plan.sequences), sequence)
            plan.sequences.append(sequence)
            plan.num_tokens.append(1)
            self.num_tokens += 1
