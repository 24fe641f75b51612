"""OffloadCache: where evicted prefix blocks go on living, in host memory and on a shelf behind it. Ids only."""

import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Protocol

from quire.core.shelf import DiskTierRead
from quire.core.stats import OffloadStats
from quire.memory.transfers import PendingTransfers

MOST_SAVED = 256  # blocks that one step sends away: its pass waits for the copies of blocks that it is given
LOOKED_AT = 16  # oldest host blocks that are asked whether they may be reused
READ_PATIENCE = 1.0  # seconds that a request waits for the shelf before it computes instead


class DiskTier(Protocol):
    """Keeps contents beyond this process. Everything happens in its own threads; nothing here waits or fails."""

    @property
    def num_blocks(self) -> int:
        """That it keeps."""
        ...

    def has(self, content: bytes) -> bool: ...

    def write(self, content: bytes, host: int, ticket: int) -> bool:
        """Writes the host block once the moves of `ticket` are made; False if it is too far behind to take it."""
        ...

    def read(self, content: bytes, host: int) -> None: ...

    def finished(self) -> tuple[list[int], list[DiskTierRead]]:
        """Host blocks that were written (or given up), and reads that ended, since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something is finished, but no longer than that."""
        ...

    def block_seconds(self) -> float:
        """Of reading one block, as measured; 0 until one was read."""
        ...

    def clear(self) -> None: ...


class CopyQueue(Protocol):
    """Whoever makes the moves of steps. The n-th moves that a step carried have ticket n."""

    def num_moved(self) -> int:
        """The last ticket whose moves are made, and of all before it."""
        ...


class OffloadCache:
    """Contents by hash, least recently used first to go.

    A content is promised only when its bytes are in a host block or on their way there in an earlier move of the
    same order; what comes from the shelf was checked before it is known here: a fault is a miss, never a wrong page.
    """

    def __init__(
        self,
        first_host: int,
        num_hosts: int,
        moves: PendingTransfers,
        courier: CopyQueue,
        shelf: DiskTier | None,
    ) -> None:
        """Host blocks first_host … first_host + num_hosts - 1 are its own."""
        self.stats = OffloadStats()
        self.num_hosts = num_hosts
        self.shelf = shelf
        self._moves = moves
        self._courier = courier
        self._free = list(range(first_host + num_hosts - 1, first_host - 1, -1))
        self._host_of: OrderedDict[bytes, int] = OrderedDict()
        self._tickets: dict[int, int] = {}  # by host block: the last moves that touch it
        self._busy: set[int] = set()  # host blocks that the shelf reads or writes now
        self._reading: dict[bytes, int] = {}
        self._forgotten: set[int] = set()  # of those that the shelf is busy with: nobody wants them any more
        self._asked: tuple[str, float, frozenset[bytes]] = ("", 0.0, frozenset())

    @property
    def num_used(self) -> int:
        return self.num_hosts - len(self._free)

    @property
    def num_shelved(self) -> int:
        return 0 if self.shelf is None else self.shelf.num_blocks

    # ------------------------------------------------------------------ blocks leave the pool

    def save(self, content: bytes, block: int) -> None:
        """The block is about to be given out again: its content leaves in the next step, before anything is written."""
        if content in self._host_of:
            self._host_of.move_to_end(content)
            return
        self._settle()
        if content in self._reading or len(self._moves.out_blocks) >= MOST_SAVED:
            self.stats.dropped += content not in self._reading
            return
        host = self._take(quiet=False)
        if host is None:
            self.stats.dropped += 1
            return
        ticket = self._moves.ticket
        self._moves.out(block, host)
        self._tickets[host] = ticket
        self._host_of[content] = host
        self.stats.saved += 1
        if self.shelf is not None and not self.shelf.has(content) and self.shelf.write(content, host, ticket):
            self._busy.add(host)

    # ------------------------------------------------------------------ and come back

    def claim(self, content: bytes, block: int) -> bool:
        """The block gets this content in the next step; False if nobody has it."""
        host = self._host_of.get(content)
        if host is None:
            return False
        self._host_of.move_to_end(content)
        self._tickets[host] = self._moves.ticket
        self._moves.back(host, block)
        self.stats.host_hits += 1
        return True

    def has(self, content: bytes) -> bool:
        return content in self._host_of

    def awaits(self, request_id: str, contents: Iterable[bytes]) -> bool:
        """Whether it is worth waiting for contents, one request's, that the shelf is about to bring."""
        if self.shelf is None:
            return False
        self._settle()
        asked, deadline, wanted = self._asked
        if asked != request_id:
            wanted = frozenset(self._ask(contents))
            deadline = time.monotonic() + READ_PATIENCE
            self._asked = (request_id, deadline, wanted)
        return time.monotonic() < deadline and not wanted.isdisjoint(self._reading)

    def _ask(self, contents: Iterable[bytes]) -> list[bytes]:
        """Has the shelf read what it has of these, from the first that host memory does not hold on."""
        assert self.shelf is not None
        asked: list[bytes] = []
        for content in contents:
            if content in self._host_of:
                self._host_of.move_to_end(content)
                continue
            if content not in self._reading:
                host = self._take(quiet=True) if self.shelf.has(content) else None
                if host is None:
                    break
                self._reading[content] = host
                self._busy.add(host)
                self.shelf.read(content, host)
            asked.append(content)
            if len(asked) >= self.num_hosts // 2:
                break
        return asked

    def wait(self, seconds: float) -> None:
        """Where there is nothing else to do: until the shelf brings something, but no longer than that."""
        if self.shelf is not None and self._reading:
            self.shelf.wait(seconds)

    def clear(self) -> None:
        """Forgets all content. Host blocks that the shelf is busy with follow when it has done."""
        if self.shelf is not None:
            self.shelf.clear()
        self._settle()
        self._forgotten.update(self._busy)
        self._free += [host for host in self._host_of.values() if host not in self._busy]
        self._host_of.clear()
        self._asked = ("", 0.0, frozenset())

    # ------------------------------------------------------------------ host blocks

    def _take(self, quiet: bool) -> int | None:
        """A host block that nobody needs; `quiet`: nor does any move still under way touch it."""
        done = self._courier.num_moved() if quiet else self._moves.ticket - 1
        for i in range(len(self._free) - 1, max(-1, len(self._free) - 1 - LOOKED_AT), -1):
            if self._tickets.get(self._free[i], 0) <= done:
                return self._free.pop(i)
        for content, host in islice(self._host_of.items(), LOOKED_AT):
            if host not in self._busy and self._tickets.get(host, 0) <= done:
                del self._host_of[content]
                return host
        return None

    def _settle(self) -> None:
        """Hears what the shelf has done since."""
        if self.shelf is None or not self._busy:
            return
        written, reads = self.shelf.finished()
        self._busy.difference_update(written)
        for host in self._forgotten.intersection(written):
            self._forgotten.remove(host)
            self._free.append(host)
        for read in reads:
            self._busy.discard(read.host)
            del self._reading[read.content]
            wanted = read.host not in self._forgotten and read.content not in self._host_of
            self._forgotten.discard(read.host)
            if read.fine and wanted:
                self._host_of[read.content] = read.host
                self.stats.disk_hits += 1
            else:
                self._free.append(read.host)
                self.stats.disk_faults += not read.fine

    def check_integrity(self) -> None:
        writing = self._forgotten.difference(self._reading.values())
        held = [*self._host_of.values(), *self._reading.values(), *self._free, *writing]
        if len(held) != self.num_hosts or len(set(held)) != self.num_hosts:
            raise RuntimeError("a host block of the second home is lost or held twice")
