"""PendingTransfers: block copies between the pool and host memory that the next step carries."""

from dataclasses import dataclass, field

from quire.core.request import ints
from quire.core.step import HostTransfers


@dataclass(slots=True)
class PendingTransfers:
    """Collected while a step is planned, and kept until a step carries them: content must not be lost.

    Blocks are copied out before the step writes anything, so they may be reused by the same step.
    """

    out_blocks: list[int] = field(default_factory=list)
    out_hosts: list[int] = field(default_factory=list)
    in_hosts: list[int] = field(default_factory=list)
    in_blocks: list[int] = field(default_factory=list)
    ticket: int = 1  # of these transfers: counts how often a step carried some

    def out(self, block: int, host: int) -> None:
        self.out_blocks.append(block)
        self.out_hosts.append(host)

    def back(self, host: int, block: int) -> None:
        self.in_hosts.append(host)
        self.in_blocks.append(block)

    def take(self) -> HostTransfers | None:
        """The transfers that the next step carries, once; None if there are none."""
        if not self.out_blocks and not self.in_blocks:
            return None
        taken = HostTransfers(
            ints(self.out_blocks), ints(self.out_hosts), ints(self.in_hosts), ints(self.in_blocks)
        )
        self.ticket += 1
        self.out_blocks, self.out_hosts, self.in_hosts, self.in_blocks = [], [], [], []
        return taken
