"""Group: the ranks that compute one model together, their collectives, and the bytes that these move.

`Group` itself is a group of one, or one rank of others that do not exist: it counts and moves nothing. Groups
of processes are in parallel/processes.py.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

KINDS = ("all_reduce", "all_gather", "gather", "broadcast", "send", "receive")
MAX_TAGS = 16
SUM, LARGEST = "sum", "largest"


def factor(kind: str, size: int) -> Fraction:
    """Bytes that a rank moves per byte of payload, by the usual formulas: a ring's all-reduce moves 2(N-1)/N.

    The payload of a gather is its result.
    """
    if size == 1:
        return Fraction(0)
    shares = {"all_reduce": 2, "all_gather": 1, "gather": 1}
    return Fraction(shares[kind] * (size - 1), size) if kind in shares else Fraction(1)


class Group:
    """One of `size` ranks. Every rank makes the same calls in the same order; `tag` says what the bytes are."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._tags: dict[str, int] = {}
        self._counters = np.zeros(len(KINDS) * MAX_TAGS, np.int64)  # payload bytes
        self.check: Callable[[], None] = lambda: None  # raises if a rank is gone
        self._waits = False

    def all_reduce(self, x: Tensor, tag: str, how: str = SUM) -> Tensor:
        """x, dense, becomes the sum (or the largest value) over all ranks; returns x."""
        self._count("all_reduce", tag, x.nbytes)
        return x

    def all_gather(self, x: Tensor, widths: tuple[int, ...], tag: str) -> Tensor:
        """x [T, widths[rank]] -> [T, sum of widths], the ranks' columns side by side."""
        return self._gather("all_gather", x, widths, tag, True)

    def gather(self, x: Tensor, widths: tuple[int, ...], tag: str) -> Tensor:
        """As `all_gather` on rank 0; other ranks keep x."""
        return self._gather("gather", x, widths, tag, self.rank == 0)

    def broadcast(self, x: Tensor, tag: str) -> Tensor:
        """x, dense, becomes rank 0's; returns x."""
        self._count("broadcast", tag, x.nbytes)
        return x

    def send(self, x: Tensor, to: int, tag: str) -> None:
        """x, dense, to the `receive` of rank `to`."""
        self._count("send", tag, x.nbytes)

    def receive(self, x: Tensor, source: int, tag: str) -> Tensor:
        """Into x, dense, what rank `source` sends; returns x."""
        self._count("receive", tag, x.nbytes)
        return x

    def numbers(self, value: int) -> list[int]:
        """Every rank's number, at most 2^62 in size."""
        gathered = self.all_gather(torch.tensor([[value]]), (1,) * self.size, "start")
        self.check()
        return [int(number) for number in gathered.flatten()]

    def traffic(self) -> dict[tuple[str, str], int]:
        """Bytes that this rank moved, by kind and tag: `factor` times the payload, as an integer."""
        found, counted = {}, self._counted()
        for tag, column in self._tags.items():
            for row, kind in enumerate(KINDS):
                if payload := int(counted[row * MAX_TAGS + column]):
                    found[kind, tag] = int(factor(kind, self.size) * payload)
        return found

    def counter(self, kind: str, tag: str) -> int:
        """Which counter is that of a kind and a tag."""
        column = self._tags.setdefault(tag, len(self._tags))
        if column >= MAX_TAGS:
            raise ValueError(f"more than {MAX_TAGS} tags: {', '.join(self._tags)}")
        return KINDS.index(kind) * MAX_TAGS + column

    def _counted(self) -> np.ndarray:
        return self._counters

    def _count(self, kind: str, tag: str, payload: int) -> None:
        self._counters[self.counter(kind, tag)] += payload

    def _gather(self, kind: str, x: Tensor, widths: tuple[int, ...], tag: str, wanted: bool) -> Tensor:
        self._count(kind, tag, x.shape[0] * sum(widths) * x.element_size())
        return self._gathered(x, widths, wanted)

    def _gathered(self, x: Tensor, widths: tuple[int, ...], wanted: bool) -> Tensor:
        """x on a rank that does not want the whole. Columns of ranks that do not exist are left empty."""
        if len(widths) == 1 or not wanted:
            return x
        whole = x.new_zeros(x.shape[0], sum(widths))
        first = sum(widths[: self.rank])
        whole[:, first : first + x.shape[1]] = x
        return whole

    def waits(self) -> bool:
        """Whether a call waits for another rank, on the host."""
        return self._waits

    def abort(self, why: str = "") -> None:
        """A rank is gone: no other one waits any longer."""

    def close(self) -> None: ...
