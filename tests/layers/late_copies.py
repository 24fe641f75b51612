"""A computation and copies beside it that run as late as their marks allow, or as early: what events must order."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Mark:
    """A place in one of the two queues."""

    queue: list[Callable[[], None]]
    place: int


@dataclass
class LateCopies:
    """Two queues that run one entry at a time, in an order drawn by chance that no mark forbids.

    A computation is queued with `compute`; `drain` runs all that is left.
    """

    chance: random.Random
    computation: list[Callable[[], None]] = field(default_factory=list)
    copies: list[Callable[[], None]] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)  # entries that ran, by the queue's identity
    waits: dict[tuple[int, int], Mark] = field(default_factory=dict)  # an entry runs only after this mark

    def mark(self) -> Mark:
        return Mark(self.computation, len(self.computation))

    def compute(self, work: Callable[[], None]) -> None:
        self.computation.append(work)
        self._run_some()

    def copy(self, source: Tensor, target: Tensor, after: Mark | None) -> Mark:
        if after is not None:
            self.waits[id(self.copies), len(self.copies)] = after
        self.copies.append(lambda: target.copy_(source))
        mark = Mark(self.copies, len(self.copies))
        self._run_some()
        return mark

    def wait(self, mark: Mark) -> None:
        self.waits[id(self.computation), len(self.computation)] = mark
        self.computation.append(lambda: None)

    def settle(self, mark: Mark) -> None:
        while self.done.get(id(mark.queue), 0) < mark.place:
            assert self._run_one(), "a mark that can never be reached"

    def drain(self) -> None:
        while self._run_one():
            pass
        assert self.done.get(id(self.computation), 0) == len(self.computation)
        assert self.done.get(id(self.copies), 0) == len(self.copies)

    def _run_some(self) -> None:
        for _ in range(self.chance.randrange(4)):
            self._run_one()

    def _run_one(self) -> bool:
        queues = [self.computation, self.copies]
        self.chance.shuffle(queues)
        for queue in queues:
            place = self.done.get(id(queue), 0)
            mark = self.waits.get((id(queue), place))
            if place < len(queue) and (mark is None or self.done.get(id(mark.queue), 0) >= mark.place):
                queue[place]()
                self.done[id(queue)] = place + 1
                return True
        return False


class PromptCopies:
    """CopyStream that are over when they are asked for: for a computation that does not queue."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0

    def mark(self) -> None:
        return None

    def copy(self, source: Tensor, target: Tensor, after: None) -> None:
        self.num_bytes += source.nbytes
        target.copy_(source)

    def wait(self, mark: None) -> None:
        return None

    def settle(self, mark: None) -> None:
        return None
