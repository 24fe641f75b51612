"""Groups of processes for tensors on the CPU: through shared memory on one machine, or torch's gloo."""

import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quire.observe.logs import get_logger
from quire.parallel.group import LARGEST, SUM, Group, bounds_of

SHARED_FOLDER = "/dev/shm"
START = timedelta(seconds=300)  # for the slowest rank to load its libraries and open the model
REASON_SECONDS = 3.0  # within which it is known why a rank's connections are lost
log = get_logger(__name__)


def shared_file(num_bytes: int) -> int:
    """A descriptor of memory without a name, for processes that inherit it: nothing is left when they end."""
    folder = SHARED_FOLDER if os.path.isdir(SHARED_FOLDER) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class SharedGroup(Group):
    """Collectives of native code over memory that all ranks map: microseconds, and a tape records them."""

    def __init__(
        self, kernel: ModuleType, empty: ModuleType, memory: mmap.mmap, first: int, rank: int, size: int
    ) -> None:
        """`kernel`: kernels/collective/cpu.py; `empty`: what has the `empty` of native operations' results.

        The group's own memory begins at byte `first`.
        """
        super().__init__(rank, size)
        self._empty = empty.empty
        self._kernel = kernel
        self._memory, self._first = memory, first
        self._all = kernel.Endpoint(memory, first, rank, size, len(self._counters))
        self._channels: dict[tuple[int, int], Any] = {}
        self._bounds: dict[tuple[int, ...], Tensor] = {}

    @staticmethod
    def num_bytes(kernel: ModuleType, size: int) -> int:
        return int(kernel.group_bytes(size) + size * size * kernel.channel_bytes())

    def all_reduce(self, x: Tensor, tag: str, how: str = SUM) -> Tensor:
        self._all.reduce(x, self.counter("all_reduce", tag), how)
        return x

    def all_gather(self, x: Tensor, widths: tuple[int, ...], tag: str) -> Tensor:
        out: Tensor = self._empty(x.shape[0], sum(widths), dtype=x.dtype)
        self._all.gather(x, self.counter("all_gather", tag), self._in_bytes(widths, x), out)
        return out

    def gather(self, x: Tensor, widths: tuple[int, ...], tag: str) -> Tensor:
        out = self._empty(x.shape[0], sum(widths), dtype=x.dtype) if self.rank == 0 else None
        self._all.gather(x, self.counter("gather", tag), self._in_bytes(widths, x), out)
        return x if out is None else out

    def broadcast(self, x: Tensor, tag: str) -> Tensor:
        self._all.broadcast(x, self.counter("broadcast", tag), 0)
        return x

    def send(self, x: Tensor, to: int, tag: str) -> None:
        self._channel(self.rank, to).pass_on(x, self.counter("send", tag))

    def receive(self, x: Tensor, source: int, tag: str) -> Tensor:
        self._channel(source, self.rank).pass_on(x, self.counter("receive", tag))
        return x

    def _counted(self) -> np.ndarray:
        return sum((channel.counters for channel in self._channels.values()), start=self._all.counters)

    def abort(self, why: str = "") -> None:
        self._all.abort()
        for source in range(self.size):
            for to in range(self.size):
                self._channel(source, to).abort()

    def _channel(self, source: int, to: int) -> Any:
        found = self._channels.get((source, to))
        if found is None:
            kernel = self._kernel
            number = source * self.size + to
            offset = self._first + kernel.group_bytes(self.size) + number * kernel.channel_bytes()
            end = 0 if source == self.rank else 1
            found = kernel.Endpoint(self._memory, offset, end, kernel.SLOTS, len(self._counters))
            self._channels[source, to] = found
        return found

    def _in_bytes(self, widths: tuple[int, ...], x: Tensor) -> Tensor:
        """Kept: a tape reads them again."""
        key = (*widths, x.element_size())
        if key not in self._bounds:
            self._bounds[key] = bounds_of(widths, x.element_size())
        return self._bounds[key]


class TorchGroup(Group):
    """torch.distributed's collectives: gloo for the CPU and between machines, NCCL between GPUs."""

    def __init__(
        self, backend: str, store: Any, rank: int, size: int, members: Sequence[int] = (), group: Any = None
    ) -> None:
        """`group`: the part of the process group, which was made before, that has these `members`."""
        super().__init__(rank, size)
        self._members, self._torch = members or range(size), group
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._waits, self._on_gpus = False, "nccl" in backend
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=START, store=store, rank=rank, world_size=size)

    def divided(self, parts: Sequence[Sequence[int]]) -> Group:
        """This rank's part. Every rank gives the same parts."""
        if len(parts[0]) == 1:
            return Group()
        made = [dist.new_group(list(part)) for part in parts]
        number = next(number for number, part in enumerate(parts) if self.rank in part)
        own = parts[number]
        return TorchGroup("", None, own.index(self.rank), len(own), own, made[number])

    def _wait(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A rank that is gone breaks its connections first; soon after it is known which one, and why."""
        self._waits = True
        try:
            return collective(*arguments, group=self._torch, **options)
        except RuntimeError:
            deadline = time.monotonic() + REASON_SECONDS
            while time.monotonic() < deadline:
                self.check()
                time.sleep(0.05)
            raise
        finally:
            self._waits = False

    def all_reduce(self, x: Tensor, tag: str, how: str = SUM) -> Tensor:
        self._wait(dist.all_reduce, x, dist.ReduceOp.MAX if how == LARGEST else dist.ReduceOp.SUM)
        return super().all_reduce(x, tag, how)

    def _gathered(self, x: Tensor, widths: tuple[int, ...], wanted: bool) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        pieces = [torch.empty_like(padded) for _ in widths]
        self._wait(dist.all_gather, pieces, padded)
        if not wanted:
            return x
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], dim=1)

    def broadcast(self, x: Tensor, tag: str) -> Tensor:
        self._wait(dist.broadcast, x, self._members[0])
        return super().broadcast(x, tag)

    def send(self, x: Tensor, to: int, tag: str) -> None:
        """Returns at once while few are under way: two stages may send to each other."""
        if len(self._sent) > 2 * self.size:  # more than steps in flight: this one has been received
            oldest = self._sent.popleft()  # of gloo's sends only `wait` tells whether they have ended
            self._wait(lambda group: oldest[0].wait())
        self._sent.append((self._wait(dist.isend, x, self._members[to]), x))
        super().send(x, to, tag)

    def receive(self, x: Tensor, source: int, tag: str) -> Tensor:
        self._wait(dist.recv, x, self._members[source])
        return super().receive(x, source, tag)

    def abort(self, why: str = "") -> None:
        """What waits fails with the connection. Where that is still open, the machine being off, the process ends, and
        where a kernel may wait.
        """
        time.sleep(REASON_SECONDS)
        if self._waits or self._on_gpus:
            log.error("the engine stopped: %s", why)
            os._exit(1)

    def close(self) -> None:
        if dist.is_initialized() and not self._on_gpus:  # NCCL waits for peers, which have ended
            dist.destroy_process_group()
