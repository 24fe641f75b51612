"""PendingTransfers: blocks that travel between the pool and host memory before the next step's forward pass."""

from dataclasses import dataclass, field

from quire.core.ints import ints
from quire.core.step import HostTransfers


@dataclass(slots=True)
class PendingTransfers:
    """Collected while a step is planned, and kept until a step takes them along: content must not be lost.

    What leaves is read before anything else of the step is written, so a block may be given out again at once.
    """

    out_blocks: list[int] = field(default_factory=list)
    out_hosts: list[int] = field(default_factory=list)
    in_hosts: list[int] = field(default_factory=list)
    in_blocks: list[int] = field(default_factory=list)
    ticket: int = 1  # counts what steps took along: of these moves, once they are taken

    def out(self, block: int, host: int) -> None:
        self.out_blocks.append(block)
        self.out_hosts.append(host)

    def back(self, host: int, block: int) -> None:
        self.in_hosts.append(host)
        self.in_blocks.append(block)

    def take(self) -> HostTransfers | None:
        """What a step must carry, once; None if nothing moves."""
        if not self.out_blocks and not self.in_blocks:
            return None
        taken = HostTransfers(
            ints(self.out_blocks), ints(self.out_hosts), ints(self.in_hosts), ints(self.in_blocks)
        )
        self.ticket += 1
        self.out_blocks, self.out_hosts, self.in_hosts, self.in_blocks = [], [], [], []
        return taken
