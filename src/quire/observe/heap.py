"""Garbage collection of a serving process: rare, and never over what start-up allocated."""

import gc

# Allocations between two collections of the youngest generation; of those, between two of the next; of those, between
# two of all objects, which the engine's process collects when it is idle.
THRESHOLDS = (10_000, 10, 1_000)


def freeze_heap() -> None:
    """To be called once a process is ready to serve.

    A collection of everything takes 100 ms and more with a model's modules loaded, and every stream waits for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
