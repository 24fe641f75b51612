"""Tensors in huge pages, and what C's allocator does with freed memory.

Weights and KV pages are read once per step from all over memory: with pages of 4 KiB, address translation costs a fifth
of the bandwidth.
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
REGION = 32 << 20
SMALLEST_ALONE = REGION // 2  # bytes
ALIGNMENT = 64
SPARE_BYTES = 512 << 20  # unused mappings kept for reuse, at most
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of mallopt
KEPT_BYTES = 1 << 30  # freed bytes at the end of the heap from which glibc returns them


class Regions:
    """Sub-allocates large zeroed mappings. A mapping is unmapped when its last tensor is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: mmap.mmap | None = None
        self._used = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """(mapping, offset) of `num_bytes` zeroed bytes that no other caller got."""
        if is_alone(num_bytes):
            return _map(num_bytes), 0
        with self._lock:
            if self._region is None or self._used + num_bytes > REGION:
                self._region, self._used = _map(REGION), 0
            offset = self._used
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return self._region, offset


_regions = Regions()


class Spares:
    """Unused mappings, kept for the next request of their size.

    Page faults on fresh memory take longer than reading a file into used memory, and many times longer where a virtual
    machine returns freed memory to its host. Tensors are freed in any thread at any time, so nothing here takes a lock.
    """

    def __init__(self) -> None:
        self._unused: deque[mmap.mmap] = deque()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, list(self._unused)))

    def take(self, num_bytes: int) -> mmap.mmap:
        size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        # A copy, made in one call: a tuple could run the garbage collector, and so `give`, while it is made.
        for mapping in list(self._unused):
            if len(mapping) == size:
                try:
                    self._unused.remove(mapping)
                except ValueError:  # another thread was quicker
                    continue
                return mapping
        return _map(size)

    def give(self, mapping: mmap.mmap) -> None:
        if len(mapping) > SPARE_BYTES:
            return
        self._unused.append(mapping)
        while self.num_bytes > SPARE_BYTES:
            with suppress(IndexError):  # another thread took the last
                self._unused.popleft()


spares = Spares()


def is_alone(num_bytes: int) -> bool:
    """Whether a tensor of `num_bytes` gets a mapping of its own."""
    return num_bytes >= SMALLEST_ALONE


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A CPU tensor of zeros, in huge pages where the system has them; small ones share a page."""
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    mapping, offset = _regions.take(count * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)


def own_bytes(*shape: int) -> Tensor:
    """Zeros, uint8, in pages of their own: a shared page is only freed with all the tensors in it."""
    if is_alone(math.prod(shape)):
        return zeros(*shape, dtype=torch.uint8)
    return torch.zeros(shape, dtype=torch.uint8)


def spare_bytes(num_bytes: int) -> Tensor:
    """Uninitialized uint8, in a spare mapping if there is one."""
    if not is_alone(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapping = spares.take(num_bytes)
    array = np.frombuffer(mapping, np.uint8, num_bytes)
    weakref.finalize(array, spares.give, mapping).atexit = False
    return torch.from_numpy(array)


def _map(num_bytes: int) -> mmap.mmap:
    """An anonymous mapping; Linux aligns large ones to huge pages by itself."""
    mapping = mmap.mmap(
        -1, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def keep_freed() -> None:
    """Freed blocks of any size stay in the process for the next ones, as activations of a step for the next step's.

    glibc returns large blocks at once, and each prefill or training step would fault their pages in again. Blocks that
    are in use are not affected. Does nothing without glibc.
    """
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
