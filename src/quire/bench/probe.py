"""How fast this machine reads memory, measured in a fraction of a second."""

import time

import torch

PROBE_BYTES = 256 << 20  # more than most caches hold
PROBE_SECONDS = 0.4
COLUMNS = 4096


def cpu_read_rate() -> float:
    """Bytes per second in a matrix-vector product, which is what a decode step is: the best of many."""
    matrix, vector = torch.ones(PROBE_BYTES // 4 // COLUMNS, COLUMNS), torch.ones(COLUMNS)
    matrix @ vector  # the first touch is slower
    best, ends = float("inf"), time.perf_counter() + PROBE_SECONDS
    while (started := time.perf_counter()) < ends:
        matrix @ vector
        best = min(best, time.perf_counter() - started)
    return PROBE_BYTES / best
