"""OffloadCache: host-memory tier of the prefix cache, with an optional disk tier behind it. Ids only."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from quire.core.stats import OffloadStats
from quire.core.step import DiskTierRead
from quire.memory.swap import PendingTransfers

MAX_SAVED = 256  # blocks per step: its forward pass waits until the blocks that it reuses are copied out
MAX_CANDIDATES = 16  # oldest host blocks that are checked for reuse
READ_TIMEOUT = 1.0  # seconds that a request waits for the disk tier before it computes its prefix


class DiskTier(Protocol):
    """Stores blocks beyond this process. It works in its own threads: no call waits for the disk or raises."""

    @property
    def num_blocks(self) -> int:
        """Stored blocks."""
        ...

    def has(self, content: bytes) -> bool: ...

    def write(self, content: bytes, host: int, ticket: int) -> bool:
        """Writes the host block once the transfers of `ticket` are done; False if its queue is full."""
        ...

    def read(self, content: bytes, host: int) -> None: ...

    def finished(self) -> tuple[list[int], list[DiskTierRead]]:
        """Host blocks that were written (or dropped), and reads that ended, since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Waits until a read or write is finished, or `seconds` have passed."""
        ...

    def block_seconds(self) -> float:
        """Measured time of reading one block; 0 before the first read."""
        ...

    def clear(self) -> None: ...


class OffloadCache:
    """Blocks by content hash, evicted least recently used first.

    A block is listed when its bytes are in host memory or in an earlier transfer of the same queue; blocks from the
    disk tier are verified before they are listed: a fault is a miss, never a wrong block.
    """

    def __init__(
        self,
        first_host: int,
        num_hosts: int,
        transfers: PendingTransfers,
        num_moved: Callable[[], int],
        disk_tier: DiskTier | None,
    ) -> None:
        """Owns host blocks first_host … first_host + num_hosts - 1.

        Steps carry transfers in order, the n-th with ticket n; `num_moved` gives the last ticket that is done, with all
        before it.
        """
        self.stats = OffloadStats()
        self.num_hosts = num_hosts
        self.disk_tier = disk_tier
        self._transfers = transfers
        self._num_moved = num_moved
        self._free = list(range(first_host + num_hosts - 1, first_host - 1, -1))
        self._host_of: OrderedDict[bytes, int] = OrderedDict()
        self._tickets: dict[int, int] = {}  # by host block: the last transfers that touch it
        self._busy: set[int] = set()  # host blocks that the disk tier reads or writes now
        self._reading: dict[bytes, int] = {}
        self._discarded: set[int] = set()  # busy host blocks that are free when the disk tier is done
        # the last request that waited: its id, its deadline, the blocks that are being read for it
        self._request: tuple[str, float, frozenset[bytes]] = ("", 0.0, frozenset())

    @property
    def num_used(self) -> int:
        return self.num_hosts - len(self._free)

    @property
    def num_disk_blocks(self) -> int:
        return 0 if self.disk_tier is None else self.disk_tier.num_blocks

    # ------------------------------------------------------------------ eviction from the pool

    def save(self, content: bytes, block: int) -> None:
        """Copies out a block that is about to be reused; the next step does it before anything is written."""
        if content in self._host_of:
            self._host_of.move_to_end(content)
            return
        self._settle()
        if content in self._reading or len(self._transfers.out_blocks) >= MAX_SAVED:
            self.stats.dropped += content not in self._reading
            return
        host = self._take(idle_only=False)
        if host is None:
            self.stats.dropped += 1
            return
        ticket = self._transfers.ticket
        self._transfers.out(block, host)
        self._tickets[host] = ticket
        self._host_of[content] = host
        self.stats.saved += 1
        if (
            self.disk_tier is not None
            and not self.disk_tier.has(content)
            and self.disk_tier.write(content, host, ticket)
        ):
            self._busy.add(host)

    # ------------------------------------------------------------------ hits

    def claim(self, content: bytes, block: int) -> bool:
        """The block gets this content in the next step; False on a miss."""
        host = self._host_of.get(content)
        if host is None:
            return False
        self._host_of.move_to_end(content)
        self._tickets[host] = self._transfers.ticket
        self._transfers.back(host, block)
        self.stats.host_hits += 1
        return True

    def has(self, content: bytes) -> bool:
        return content in self._host_of

    def is_loading(self, request_id: str, contents: Iterable[bytes]) -> bool:
        """Whether the disk tier is reading some of the request's contents, within its timeout. Starts the reads."""
        if self.disk_tier is None:
            return False
        self._settle()
        waiting_id, deadline, wanted = self._request
        if waiting_id != request_id:
            wanted = frozenset(self._start_reads(contents))
            deadline = time.monotonic() + READ_TIMEOUT
            self._request = (request_id, deadline, wanted)
        return time.monotonic() < deadline and not wanted.isdisjoint(self._reading)

    def _start_reads(self, contents: Iterable[bytes]) -> list[bytes]:
        """Reads the longest run of contents that the disk tier has; returns what is being read."""
        assert self.disk_tier is not None
        reading: list[bytes] = []
        for content in contents:
            if content in self._host_of:
                self._host_of.move_to_end(content)
                continue
            if content not in self._reading:
                host = self._take(idle_only=True) if self.disk_tier.has(content) else None
                if host is None:
                    break
                self._reading[content] = host
                self._busy.add(host)
                self.disk_tier.read(content, host)
            reading.append(content)
            if len(reading) >= self.num_hosts // 2:
                break
        return reading

    def wait(self, seconds: float) -> None:
        """Waits until a read ends, or `seconds` have passed. For an engine with nothing else to do."""
        if self.disk_tier is not None and self._reading:
            self.disk_tier.wait(seconds)

    def clear(self) -> None:
        """Drops all content. Host blocks in use by the disk tier become free when it is done with them."""
        if self.disk_tier is not None:
            self.disk_tier.clear()
        self._settle()
        self._discarded.update(self._busy)
        self._free += [host for host in self._host_of.values() if host not in self._busy]
        self._host_of.clear()
        self._request = ("", 0.0, frozenset())

    # ------------------------------------------------------------------ host blocks

    def _take(self, idle_only: bool) -> int | None:
        """A free or evicted host block; `idle_only`: one that no unfinished transfer touches."""
        done = self._num_moved() if idle_only else self._transfers.ticket - 1
        for i in range(len(self._free) - 1, max(-1, len(self._free) - 1 - MAX_CANDIDATES), -1):
            if self._tickets.get(self._free[i], 0) <= done:
                return self._free.pop(i)
        for content, host in islice(self._host_of.items(), MAX_CANDIDATES):
            if host not in self._busy and self._tickets.get(host, 0) <= done:
                del self._host_of[content]
                return host
        return None

    def _settle(self) -> None:
        """Takes in what the disk tier has finished."""
        if self.disk_tier is None or not self._busy:
            return
        written, reads = self.disk_tier.finished()
        self._busy.difference_update(written)
        for host in self._discarded.intersection(written):
            self._discarded.remove(host)
            self._free.append(host)
        for read in reads:
            self._busy.discard(read.host)
            del self._reading[read.content]
            wanted = read.host not in self._discarded and read.content not in self._host_of
            self._discarded.discard(read.host)
            if read.valid and wanted:
                self._host_of[read.content] = read.host
                self.stats.disk_hits += 1
            else:
                self._free.append(read.host)
                self.stats.disk_faults += not read.valid

    def check_integrity(self) -> None:
        writing = self._discarded.difference(self._reading.values())
        held = [*self._host_of.values(), *self._reading.values(), *self._free, *writing]
        if len(held) != self.num_hosts or len(set(held)) != self.num_hosts:
            raise RuntimeError("a host block of the offload cache is lost or held twice")
