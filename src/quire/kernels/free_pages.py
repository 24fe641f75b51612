"""Freed memory back to the system. C's allocator keeps what was freed between pieces in use, so that a process that
made many tensors and dropped them looks, and is, larger than what it holds."""

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Takes milliseconds; does nothing where the allocator is not glibc's."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
