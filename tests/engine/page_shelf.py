"""PageShelf: a disk for PageRunner's pages, which takes its time and sometimes loses what it was given.

It works when it is asked what it has finished, while steps are still to be run: a host block that is read or written
too early, or reused too soon, shows as a wrong token.
"""

import random

from quire.core.step import DiskTierRead
from tests.engine.page_runner import PageRunner


class PageShelf:
    def __init__(self, runner: PageRunner) -> None:
        self._runner = runner
        self._random = random.Random(9)
        self._pages: dict[bytes, list[int]] = {}
        self._writes: list[tuple[bytes, int, int]] = []
        self._reads: list[tuple[bytes, int]] = []

    @property
    def num_blocks(self) -> int:
        return len(self._pages)

    def has(self, content: bytes) -> bool:
        return content in self._pages

    def write(self, content: bytes, host: int, ticket: int) -> bool:
        if len(self._writes) > 3:
            return False
        self._writes.append((content, host, ticket))
        return True

    def read(self, content: bytes, host: int) -> None:
        self._reads.append((content, host))

    def finished(self) -> tuple[list[int], list[DiskTierRead]]:
        written, reads = [], []
        for job in list(self._writes):
            content, host, ticket = job
            if ticket <= self._runner.num_moved() and self._random.random() < 0.5:
                self._pages[content] = list(self._runner.hosts[host])
                written.append(host)
                self._writes.remove(job)
        for pair in list(self._reads):
            content, host = pair
            if self._random.random() < 0.5:
                fine = self._random.random() < 0.8 and content in self._pages
                self._runner.hosts[host] = (
                    list(self._pages[content]) if fine else [-9] * self._runner.block_size
                )
                if not fine:
                    self._pages.pop(content, None)
                reads.append(DiskTierRead(content, host, fine))
                self._reads.remove(pair)
        return written, reads

    def wait(self, seconds: float) -> None:
        pass

    def block_seconds(self) -> float:
        return 0.0

    def clear(self) -> None:
        self._pages.clear()
