"""Collectives by native code, over memory that all ranks of a group map (cpp/group.h)."""

import mmap
import os
import tempfile

import numpy as np
import torch
from torch import Tensor

from quire.kernels import native

LINE, MAX_RANKS = 64, 64
HEADER = (2 + 2 * MAX_RANKS) * LINE
CAPACITY = 4 << 20  # bytes of one rank's buffer: longer messages go in pieces
SLOTS = 4  # messages on their way between two ranks
FIELDS = 6  # of the C++ struct, before its counters
SUM, LARGEST = "sum", "largest"
_REDUCTIONS = {(torch.float32, SUM): 0, (torch.int32, SUM): 1, (torch.float32, LARGEST): 2}


def shared_file(num_bytes: int) -> int:
    """A descriptor of memory without a name, for processes that inherit it: nothing is left when they end.

    On Linux no file system limits it; a container's /dev/shm usually has 64 MB.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def group_bytes(size: int) -> int:
    """Memory of a group's exchanges; pages that are never written cost nothing."""
    return HEADER + 2 * size * CAPACITY


def channel_bytes() -> int:
    return HEADER + SLOTS * CAPACITY


class Endpoint:
    """One rank's end of shared memory: of a group, or of the channel between two ranks (0 sends, 1 receives)."""

    def __init__(self, memory: mmap.mmap, offset: int, rank: int, size: int, num_counters: int) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)  # keeps it mapped
        self._flag = self._bytes[offset : offset + 8].view(np.int64)
        address = self._bytes.ctypes.data + offset
        self._state = np.zeros(FIELDS + num_counters, np.int64)
        self._state[:FIELDS] = address, rank, size, CAPACITY, 0, 0
        self.waiting = self._state[FIELDS - 1 : FIELDS]  # 1 while another rank is waited for
        self._pointer = int(self._state.ctypes.data)
        self.counters = self._state[FIELDS:]  # payload bytes; native code adds to them, also from a tape
        self._kept = torch.from_numpy(self._state)

    def abort(self) -> None:
        """No rank waits in this memory any more: calls return with any content."""
        self._flag[0] = 1

    def reduce(self, x: Tensor, counter: int, how: str) -> None:
        """x, dense, becomes the sum (or the largest value) over the ranks, in their order."""
        kind = _REDUCTIONS.get((x.dtype, how))
        if kind is None or not x.is_contiguous():
            raise TypeError(f"a {how} over ranks takes dense float32 or int32, not {x.dtype} {x.stride()}")
        native.call("group_reduce", (self._pointer, counter, x.data_ptr(), x.numel(), kind), (x, self._kept))

    def gather(self, x: Tensor, counter: int, bounds: Tensor, out: Tensor | None) -> None:
        """Rows of x [T, width] beside those of the other ranks in `out` [T, all]; `bounds`: columns, in bytes."""
        if x.stride(-1) != 1 or int((bounds[1:] - bounds[:-1]).max()) > CAPACITY:
            raise TypeError(f"rows to gather are dense and of at most {CAPACITY} bytes, not {x.shape}")
        native.call(
            "group_gather",
            (
                self._pointer, counter, x.data_ptr(), x.stride(0) * x.element_size(), x.shape[0], bounds.data_ptr(),
                native.address(out), 0 if out is None else out.stride(0) * out.element_size(),
            ),
            (x, bounds, out, self._kept),
        )  # fmt: skip

    def broadcast(self, x: Tensor, counter: int, root: int) -> None:
        """Beside other operations: what waits for rank 0's samples must not hold them up."""
        native.call_aside("group_broadcast", (self._pointer, counter, x.data_ptr(), x.nbytes, root))

    def pass_on(self, x: Tensor, counter: int) -> None:
        """Of a channel: sends x, dense, or receives into it."""
        native.call("group_pass", (self._pointer, counter, x.data_ptr(), x.nbytes), (x, self._kept))
