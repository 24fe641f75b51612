"""Groups of processes: shared memory for the CPUs of one machine, gloo and NCCL, torch's symmetric memory for GPUs."""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, product
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quire.observe.logs import get_logger
from quire.parallel.group import LARGEST, SUM, Group

START = timedelta(seconds=300)  # for the slowest rank to load its libraries and open the model
SUMS, EXCHANGE_BYTES = 32 << 20, 16 << 20  # of a rank on a GPU, which others read: sums, other exchanges
ONE_SHOT = 512 << 10  # bytes up to which every rank reads all: longer sums are divided among the ranks
MOST_VIEWS = 1000
REASON_SECONDS = 3.0  # within which it is known why a rank's connections are lost
log = get_logger(__name__)


class SharedGroup(Group):
    """Collectives of native code over memory that all ranks map: microseconds, and a tape records them."""

    def __init__(self, kernel: ModuleType, memory: mmap.mmap, first: int, rank: int, size: int) -> None:
        """`kernel`: kernels/collective/cpu.py. The group's own memory begins at byte `first`."""
        super().__init__(rank, size)
        self._empty = kernel.native.empty
        self._all = kernel.Endpoint(memory, first, rank, size, len(self._counters))
        self._channels: dict[tuple[int, int], Any] = {}  # from one rank to another
        offset = first + kernel.group_bytes(size)
        for source, to in product(range(size), repeat=2):
            end = 0 if source == rank else 1
            channel = kernel.Endpoint(memory, offset, end, kernel.SLOTS, len(self._counters))
            self._channels[source, to] = channel
            offset += kernel.channel_bytes()
        self._bounds: dict[tuple[int, ...], Tensor] = {}

    @staticmethod
    def num_bytes(kernel: ModuleType, size: int) -> int:
        return int(kernel.group_bytes(size) + size * size * kernel.channel_bytes())

    def all_reduce(self, x: Tensor, tag: str, how: str = SUM) -> Tensor:
        self._all.reduce(x, self.counter("all_reduce", tag), how)
        return x

    def _gather(self, kind: str, x: Tensor, widths: tuple[int, ...], tag: str, wanted: bool) -> Tensor:
        out = self._empty(x.shape[0], sum(widths), dtype=x.dtype) if wanted else None
        self._all.gather(x, self.counter(kind, tag), self._in_bytes(widths, x), out)
        return x if out is None else out

    def broadcast(self, x: Tensor, tag: str) -> Tensor:
        self._all.broadcast(x, self.counter("broadcast", tag), 0)
        return x

    def send(self, x: Tensor, to: int, tag: str) -> None:
        self._channels[self.rank, to].pass_on(x, self.counter("send", tag))

    def receive(self, x: Tensor, source: int, tag: str) -> Tensor:
        self._channels[source, self.rank].pass_on(x, self.counter("receive", tag))
        return x

    def _counted(self) -> np.ndarray:
        return sum((channel.counters for channel in self._channels.values()), start=self._all.counters)

    def waits(self) -> bool:
        return any(endpoint.waiting[0] for endpoint in (self._all, *self._channels.values()))

    def abort(self, why: str = "") -> None:
        for endpoint in (self._all, *self._channels.values()):
            endpoint.abort()

    def _in_bytes(self, widths: tuple[int, ...], x: Tensor) -> Tensor:
        """[size + 1] int64: where each rank's columns begin and the last end. Kept: a tape reads them again."""
        key = (0, *(width * x.element_size() for width in widths))
        if key not in self._bounds:
            self._bounds[key] = torch.tensor(list(accumulate(key)), dtype=torch.int64)
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
        self._on_gpus = "nccl" in backend
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=START, store=store, rank=rank, world_size=size)
        self._world = dist.group.WORLD

    def divided(self, parts: Sequence[Sequence[int]]) -> Group:
        """This rank's part. Every rank gives the same parts."""
        if len(parts[0]) == 1:
            return Group()
        made = [dist.new_group(list(part)) for part in parts]
        own, group = next(pair for pair in zip(parts, made, strict=True) if self.rank in pair[0])
        return TorchGroup("", None, own.index(self.rank), len(own), own, group)

    def _wait(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        """A rank that is gone breaks its connections first; soon after it is known which one, and why."""
        self._waits = True
        try:
            return collective(*arguments, group=self._torch)
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
        """What waits fails with its connection. If that is open (a machine is off), or with NCCL, the process ends."""
        time.sleep(REASON_SECONDS)
        if self._waits or self._on_gpus:
            log.error("the engine stopped: %s", why)
            os._exit(1)

    def close(self) -> None:
        # NCCL waits for peers, which have ended; another world is that of a later engine
        if dist.is_initialized() and not self._on_gpus and dist.group.WORLD is self._world:
            dist.destroy_process_group()


class SymmetricGroup(Group):
    """Each rank has memory that all others map. Messages are written there; kernels wait for each other.

    Sums have the first part of it and wait at both ends. Other exchanges use two parts in turn and wait once: a rank at
    the next one has read this one. So a CUDA graph may hold sums only. Its bytes are counted when it is captured.
    """

    def __init__(self, rank: int, size: int, memory: Tensor, handle: Any, name: str = "") -> None:
        """`memory`: SUMS + 2 * EXCHANGE_BYTES bytes, of which `handle` knows each rank's. `name`: in torch."""
        super().__init__(rank, size)
        self._memory, self._handle, self._name = memory, handle, name
        self._turn = 0
        # of ranks' memory: making one takes as long as a launch
        self._views: dict[tuple[Any, ...], Tensor] = {}

    def all_reduce(self, x: Tensor, tag: str, how: str = SUM) -> Tensor:
        """In the order of ranks, so that all of them get the same bits."""
        if how != SUM or not x.is_floating_point():
            raise TypeError(f"a {how} over GPUs takes floating point, not {x.dtype}")
        known = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
        for piece in known.view(-1).split(SUMS // known.element_size()):
            own = self._memory[:SUMS].view(piece.dtype)[: piece.numel()]
            # Not by the sum that copies too: its first warp tells the other ranks to read while others still copy.
            own.copy_(piece)
            if piece.nbytes <= ONE_SHOT:
                torch.ops.symm_mem.one_shot_all_reduce_out(own, "sum", self._name, piece)
            else:
                torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self._name)
                piece.copy_(own)
        if known is not x:
            x.copy_(known)
        return super().all_reduce(x, tag, how)

    def _gathered(self, x: Tensor, widths: tuple[int, ...], wanted: bool) -> Tensor:
        most = EXCHANGE_BYTES // (max(widths) * x.element_size())  # rows at a time
        whole = x.new_empty(x.shape[0], sum(widths)) if wanted else x
        for first in range(0, x.shape[0], most):
            rows = x[first : first + most]
            shapes = [(rows.shape[0], width) for width in widths]
            parts = [self._exchange_view(i, shape, x.dtype) for i, shape in enumerate(shapes)]
            parts[self.rank].copy_(rows)
            self._barrier()
            if wanted:
                torch.cat(parts, dim=1, out=whole[first : first + most])
        return whole

    def broadcast(self, x: Tensor, tag: str) -> Tensor:
        assert x.nbytes <= EXCHANGE_BYTES, "a broadcast is of few tokens"
        view = self._exchange_view(0, tuple(x.shape), x.dtype)
        if self.rank == 0:
            view.copy_(x)
        self._barrier()
        if self.rank > 0:
            x.copy_(view)
        return super().broadcast(x, tag)

    def _exchange_view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What `rank` writes in this exchange and all others read."""
        key = (self._turn, rank, shape, dtype)
        if key not in self._views:
            if len(self._views) > MOST_VIEWS:
                self._views.clear()
            offset = (SUMS + self._turn * EXCHANGE_BYTES) // dtype.itemsize
            self._views[key] = self._handle.get_buffer(rank, shape, dtype, offset)
        return self._views[key]

    def _barrier(self) -> None:
        self._turn = 1 - self._turn
        self._handle.barrier()

    def abort(self, why: str = "") -> None:
        """A kernel that waits for a rank cannot be ended: the process is, and its supervisor starts another."""
        log.error("the engine stopped: %s", why)
        os._exit(1)
