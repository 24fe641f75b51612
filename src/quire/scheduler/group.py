"""Group: a request and its sequences, which are admitted, preempted and finished together."""

from dataclasses import dataclass, field

from quire.core.ints import ints
from quire.core.request import Phase, Request, Sequence


@dataclass(slots=True, eq=False)
class Group:
    """`sequences` starts with one; the others are forked from it when its prompt is computed."""

    request: Request
    order: int  # arrival number: first come, first served
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequences.append(Sequence(self.request, index=0, token_ids=ints(self.request.prompt_token_ids)))

    @property
    def num_unforked(self) -> int:
        return self.request.sampling.num_sequences - len(self.sequences)

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.phase is not Phase.FINISHED]

    @property
    def finished(self) -> bool:
        return self.num_unforked == 0 and not self.live

    @property
    def num_rows(self) -> int:
        """Rows that the group needs to run."""
        return len(self.live) + self.num_unforked
