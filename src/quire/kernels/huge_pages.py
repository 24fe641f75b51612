"""Tensors in huge pages. Weights and KV pages are read once per step from all over memory, and with pages of 4 KiB
looking up addresses costs a fifth of the bandwidth."""

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
SPARE_BYTES = 512 << 20  # of mappings that nobody uses, at most


class Regions:
    """Hands out pieces of large zeroed mappings. A mapping goes back when the last tensor in it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: mmap.mmap | None = None
        self._used = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """(mapping, offset) of `num_bytes` zeroed bytes that nobody else has."""
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
    """Mappings whose tensors are gone, for the next ones of their size: filling fresh memory takes longer than
    reading a file into used memory, and many times longer where a virtual machine gives freed memory back to its host.

    Tensors go in any thread and at any time, so nothing here takes a lock.
    """

    def __init__(self) -> None:
        self._unused: deque[mmap.mmap] = deque()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, list(self._unused)))

    def take(self, num_bytes: int) -> mmap.mmap:
        size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        for mapping in list(
            self._unused
        ):  # a tuple could wake the garbage collector, and so `give`, while it is made
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
    """Whether a tensor of so many bytes shares its pages with no other."""
    return num_bytes >= SMALLEST_ALONE


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A CPU tensor of zeros, in huge pages where the system has them; small ones share a page."""
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    mapping, offset = _regions.take(count * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)


def own_bytes(*shape: int) -> Tensor:
    """Zeros, uint8, that share huge pages with nothing else: others would come back only with all that is in them."""
    if is_alone(math.prod(shape)):
        return zeros(*shape, dtype=torch.uint8)
    return torch.zeros(shape, dtype=torch.uint8)


def spare_bytes(num_bytes: int) -> Tensor:
    """uint8 with anything in them, in memory that others have used before where there is any."""
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
