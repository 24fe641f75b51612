"""TransferEngine: copies blocks between the pool and host memory, beside the forward pass and in order with it."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.request import Ints
from quire.core.step import HostTransfers, Step
from quire.kernels import huge_pages
from quire.kernels.sm_share import side_stream
from quire.layers.attention import Pool
from quire.layers.streaming import PinnedMemory
from quire.observe.logs import get_logger

if TYPE_CHECKING:
    from quire.runner.disk_tier import FileDiskTier

CHUNK_BYTES = 64 << 20  # pinned when first used, or ahead of that
BETWEEN_CHUNKS = 0.001  # seconds
EVENT_BLOCKS = 16  # that leave between two events: a block that is needed again waits for no more than these
TIMED_BLOCKS = 8

logger = get_logger(__name__)


class HostArena:
    """Host blocks 1 … num_blocks, in chunks that are allocated when one of their blocks is first used.

    Pinning takes up to half a second per GiB: `prepare` does it before a step has to wait for it.
    """

    def __init__(self, block_bytes: int, num_blocks: int, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.chunk_blocks = max(1, CHUNK_BYTES // block_bytes)
        self._pinned = pinned
        self._pieces: list[PinnedMemory] = []  # pinned for as long as these are there
        self._preparing: threading.Thread | None = None
        self._closed = False
        self._chunks: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # the runner's thread and the engine's may be first to use a chunk

    def blocks(self, host: int, count: int = 1) -> Tensor:
        """[count, block_bytes] uint8: blocks that follow one another in one chunk."""
        chunk, first = divmod(host - 1, self.chunk_blocks)
        data = self._chunks.get(chunk)
        if data is None:
            with self._lock:
                data = self._chunks.get(chunk)
                if data is None:
                    size = min(self.chunk_blocks, self.num_blocks - chunk * self.chunk_blocks)
                    data = self._chunks[chunk] = self._allocate(size)
        return data[first : first + count]

    def prepare(self, num_blocks: int) -> None:
        """Pins the chunks of the first `num_blocks` in a thread, once. Without pinning there is nothing to do."""
        if self._pinned and self._preparing is None:
            firsts = range(1, min(num_blocks, self.num_blocks) + 1, self.chunk_blocks)
            # no daemon: one that is in the middle of a chunk when the interpreter ends would abort the process
            self._preparing = threading.Thread(target=self._prepare, args=(firsts,), name="quire-pinning")
            self._preparing.start()

    def _prepare(self, firsts: range) -> None:
        for host in firsts:
            if self._closed or not threading.main_thread().is_alive():
                return
            self.blocks(host)
            time.sleep(BETWEEN_CHUNKS)  # lets a step that waits for a chunk go first

    def close(self) -> None:
        self._closed = True
        if self._preparing is not None:
            self._preparing.join()

    def _allocate(self, num_blocks: int) -> Tensor:
        size = num_blocks * self.block_bytes
        if self._pinned:
            try:
                self._pieces.append(PinnedMemory(size, torch.device("cuda"), "swap_space or kv_offload_gb"))
                return self._pieces[-1].bytes.view(num_blocks, self.block_bytes)
            except (ConfigError, RuntimeError) as error:
                logger.warning("blocks move more slowly: %s", str(error).splitlines()[0])
                self._pinned = False
        return huge_pages.zeros(num_blocks, self.block_bytes, dtype=torch.uint8)


WaitMoved = Callable[[int, float], bool]  # TransferEngine.wait_moved
# Opens the disk tier behind host blocks; None where it cannot be used.
OpenDiskTier = Callable[[HostArena, WaitMoved], "FileDiskTier | None"]


class TransferEngine:
    """On a GPU everything travels on one side stream, so host blocks are read and written in the order of the steps.

    - What leaves is read once the steps launched before have run. Its block may be given out in the same step, whose
      pass then waits for that block's copy, and for no other.
    - What comes back is written once the steps launched before have run, since one of them may still write into the
      block for a sequence that ended. The next step waits for it, and this one only if it reads it.

    On a CPU the runner's thread copies, in the same order.
    """

    def __init__(
        self, pool: Pool, hosts: int | HostArena, open_disk_tier: OpenDiskTier | None = None
    ) -> None:
        """`hosts`: host blocks, or how many to make. `open_disk_tier` is given them and `wait_moved`; what it opens is
        closed with this."""
        self._data = pool.data
        self._device = pool.data.device
        on_gpu = self._device.type == "cuda"
        self.arena = HostArena(pool.layout.block_bytes, hosts, on_gpu) if isinstance(hosts, int) else hosts
        # all that is written into blocks beside the passes is queued here, and so in order; None on a CPU
        self.stream = side_stream(self._device) if on_gpu else None
        self._leaving: dict[int, torch.cuda.Event] = {}  # by block: when its copy is made
        self._last_left: torch.cuda.Event | None = None
        self._arriving: torch.cuda.Event | None = None  # of earlier steps, that no pass has waited for
        self._moved = threading.Condition()
        self._num_moved = 0  # moves that are made, and all before them
        self._under_way: deque[torch.cuda.Event] = deque()  # of the moves after these
        self.disk_tier = open_disk_tier(self.arena, self.wait_moved) if open_disk_tier is not None else None

    def close(self) -> None:
        if self.disk_tier is not None:
            self.disk_tier.close()
            self.disk_tier = None  # it calls `wait_moved`: a cycle with the memory of both
        self.arena.close()

    @torch.inference_mode()
    def move(self, step: Step) -> None:
        """Queues the step's moves, and makes its pass wait for what it is about to touch. The host does not wait."""
        if self.stream is None:
            if step.moves is not None:
                self._copy_out(step.moves.out_blocks, step.moves.out_hosts)
                self._copy_in(step.moves)
                with self._moved:
                    self._num_moved += 1
                    self._moved.notify_all()
            return
        if step.moves is None and self._arriving is None and not self._leaving:
            return
        passes = torch.cuda.current_stream(self._device)
        if self._arriving is not None:
            passes.wait_event(self._arriving)
            self._arriving = None
        if step.moves is not None:
            self._queue(step, step.moves, passes)
        self._await_leaving(step, passes)

    def _queue(self, step: Step, moves: HostTransfers, passes: torch.cuda.Stream) -> None:
        assert self.stream is not None
        self.stream.wait_stream(passes)
        with torch.cuda.stream(self.stream):
            for first in range(0, len(moves.out_blocks), EVENT_BLOCKS):
                blocks = moves.out_blocks[first : first + EVENT_BLOCKS]
                self._copy_out(blocks, moves.out_hosts[first : first + EVENT_BLOCKS])
                self._last_left = torch.cuda.Event()
                self._last_left.record(self.stream)
                for block in blocks:
                    self._leaving[block] = self._last_left
            self._copy_in(moves)
            done = torch.cuda.Event()
            done.record(self.stream)
        with self._moved:
            self._under_way.append(done)
            self._moved.notify_all()
        if moves.in_blocks and _reads(step, set(moves.in_blocks)):
            passes.wait_event(done)
        elif moves.in_blocks:
            self._arriving = done

    def _await_leaving(self, step: Step, passes: torch.cuda.Stream) -> None:
        if self._last_left is not None and self._last_left.query():
            self._leaving.clear()
            self._last_left = None
        if not self._leaving:
            return
        waited: set[int] = set()
        for block in {*step.table_blocks, *step.copy_targets}:
            event = self._leaving.pop(block, None)
            if event is not None and id(event) not in waited:
                waited.add(id(event))
                passes.wait_event(event)

    def _copy_out(self, blocks: Ints, hosts: Ints) -> None:
        for block, host, count in self._runs(blocks, hosts):
            self.arena.blocks(host, count).copy_(self._data[block : block + count], non_blocking=True)

    def _copy_in(self, moves: HostTransfers) -> None:
        for block, host, count in self._runs(moves.in_blocks, moves.in_hosts):
            self._data[block : block + count].copy_(self.arena.blocks(host, count), non_blocking=True)

    def _runs(self, blocks: Ints, hosts: Ints) -> Iterator[tuple[int, int, int]]:
        """(block, host, count): stretches that follow one another on both sides, and lie in one chunk."""
        size, first = self.arena.chunk_blocks, 0
        for end in range(1, len(blocks) + 1):
            count = end - first
            if (
                end == len(blocks)
                or blocks[end] != blocks[first] + count
                or hosts[end] != hosts[first] + count
                or (hosts[end] - 1) % size == 0
            ):
                yield blocks[first], hosts[first], count
                first = end

    # ------------------------------------------------------------------ how far, how fast

    def num_moved(self) -> int:
        """How many steps' moves are made, in order."""
        with self._moved:
            while self._under_way and self._under_way[0].query():
                self._under_way.popleft()
                self._num_moved += 1
            return self._num_moved

    def wait_moved(self, number: int, seconds: float) -> bool:
        """Waits until `number` steps' moves are made, `seconds` at most for one not launched yet; whether they are."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._num_moved + len(self._under_way) >= number, seconds):
                return False
            behind = number - self._num_moved
            event = self._under_way[behind - 1] if behind > 0 else None
        if event is not None:
            event.synchronize()
        return True

    @torch.inference_mode()
    def block_seconds(self) -> float:
        """Of one block, one way: measured both ways, with block 0 of the pool."""
        hosts = range(1, min(TIMED_BLOCKS, self.arena.num_blocks) + 1)
        seconds = []
        for _ in range(4):
            self._synchronize()
            started = time.perf_counter()
            for host in hosts:
                self.arena.blocks(host).copy_(self._data[:1], non_blocking=True)
            for host in hosts:
                self._data[:1].copy_(self.arena.blocks(host), non_blocking=True)
            self._synchronize()
            seconds.append((time.perf_counter() - started) / (2 * len(hosts)))
        return statistics.median(seconds[1:])  # the first touches the memory

    def _synchronize(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self._device)


def _reads(step: Step, arriving: set[int]) -> bool:
    """Whether a row that starts in this step and advances in it has one of these blocks in its table."""
    advancing = set(step.rows)
    return any(
        start.row in advancing and not arriving.isdisjoint(start.block_ids) for start in step.starts
    ) or not arriving.isdisjoint(step.copy_sources)
