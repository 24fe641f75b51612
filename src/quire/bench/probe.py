"""How fast this machine reads memory and multiplies, each measured in a fraction of a second."""

import time
from collections.abc import Callable

import torch

PROBE_BYTES = 256 << 20  # more than most caches hold
PROBE_SECONDS = 0.4
COLUMNS = 4096
SIDE = 1024  # of the square matrices that are multiplied


def cpu_read_rate() -> float:
    """Bytes per second in a matrix-vector product, which is what a decode step is: the best of many."""
    matrix, vector = torch.ones(PROBE_BYTES // 4 // COLUMNS, COLUMNS), torch.ones(COLUMNS)
    return PROBE_BYTES / _best(lambda: matrix @ vector)


def cpu_copy_rate() -> float:
    """Bytes per second from one place in memory to another: the best of many."""
    source, target = torch.ones(PROBE_BYTES // 4), torch.empty(PROBE_BYTES // 4)
    return PROBE_BYTES / _best(lambda: target.copy_(source))


def cpu_product_rate() -> float:
    """Float32 operations per second in a product of two matrices: the best of many."""
    left, right = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    return 2 * SIDE**3 / _best(lambda: left @ right)


def _best(work: Callable[[], object]) -> float:
    """Seconds."""
    work()  # the first touch is slower
    best, ends = float("inf"), time.perf_counter() + PROBE_SECONDS
    while (started := time.perf_counter()) < ends:
        work()
        best = min(best, time.perf_counter() - started)
    return best
