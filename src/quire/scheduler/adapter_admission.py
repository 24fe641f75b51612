"""AdapterAdmission: brings a request's adapter into pages before the request is admitted."""

from enum import Enum
from typing import Protocol

from quire.core.errors import AdapterError
from quire.core.request import ints
from quire.core.step import AdapterLoad
from quire.memory.paged import PagedMemory
from quire.scheduler.queue import SequenceGroup, WaitingQueue, blocks_to_resume

LOOK_AHEAD = 64  # waiting groups whose adapters are prefetched


class HostCopy(Protocol):
    """An adapter in host memory."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def content(self) -> str: ...  # a hash


class HostCopies(Protocol):
    """Adapters in host memory."""

    def want(self, key: str) -> HostCopy | None:
        """The adapter; None while it is being read, AdapterError if it cannot be."""
        ...

    def hold(self, key: str) -> None:
        """Keeps the adapter from eviction: a step is about to copy it."""
        ...

    def let_go(self, key: str) -> None: ...


class Readiness(Enum):
    READY = "ready"  # in pages before the step runs
    LOADING = "loading"  # being read or copied: groups behind may go first
    NO_ROOM = "no room"  # pages must become free first; no group may pass
    FAILED = "failed"


class AdapterAdmission:
    """If other rows run, pages are taken one step before the adapter's first row, so that the copy overlaps that step.
    A group whose adapter is being read from disk lets others pass.
    """

    governs_all = False  # whether requests without an adapter are checked too

    def __init__(self, copies: HostCopies, memory: PagedMemory, max_adapters: int | None = None) -> None:
        self._copies = copies
        self._memory = memory
        self._pages = memory.adapter_pages
        self._max_adapters = max_adapters
        self._loads: dict[str, AdapterLoad] = {}  # not carried by a step yet
        self._taken: list[str] = []  # keys that the newest step carries
        # taken out of the queue; the engine ends them
        self.failed: list[tuple[SequenceGroup, AdapterError]] = []

    def ready(self, group: SequenceGroup, reserved: int, alone: bool) -> Readiness:
        """Whether the next group could be admitted as far as its adapter goes. See `prepare`."""
        if group.request.adapter is None and not self.governs_all:
            return Readiness.READY
        return self.prepare(group, reserved + blocks_to_resume(self._memory, group), alone)

    def prepare(
        self, group: SequenceGroup, reserved: int, alone: bool = False, early: bool = False
    ) -> Readiness:
        """Brings the group's adapter into pages. `reserved` blocks stay free for K and V. `alone`: nothing else would
        run in this step. `early`: a prefetch.
        """
        key = group.request.adapter
        if key is None:
            return Readiness.READY
        pages = self._pages
        if (
            self._max_adapters is not None
            and pages.num_in_use >= self._max_adapters
            and key not in pages.in_use()
        ):
            return Readiness.NO_ROOM
        resident = pages.is_resident(key)
        try:
            copy = None if resident else self._copies.want(key)
            if copy is None and not resident:
                return Readiness.LOADING
            self._check(group, pages.size_of(key) if copy is None else copy.num_blocks)
        except AdapterError as error:
            self.failed.append((group, error))
            return Readiness.FAILED
        if copy is not None:
            if not self._has_room(copy.num_blocks, reserved, alone, early):
                return Readiness.NO_ROOM
            blocks = pages.load(key, copy.num_blocks, copy.content)
            if key not in self._loads:  # else it was evicted before a step carried it, and is held already
                self._copies.hold(key)
            self._loads[key] = AdapterLoad(key, ints(blocks))
        return Readiness.LOADING if key in self._loads and not alone else Readiness.READY

    def _has_room(self, num_blocks: int, reserved: int, alone: bool, early: bool) -> bool:
        """Only the first waiting group may evict an idle adapter, and none that was loaded for another waiting group:
        they would evict each other. If nothing else runs it may evict any, or no group would ever run.
        """
        pages = self._pages
        if early:
            return pages.has_spare_room(num_blocks, reserved)
        if alone or not self._loads:
            return pages.has_room(num_blocks, reserved)
        in_use = pages.in_use()
        on_way = [load for key, load in self._loads.items() if key not in in_use and pages.is_resident(key)]
        return pages.has_room_beside(num_blocks, reserved, sum(len(load.block_ids) for load in on_way))

    def look_ahead(self, waiting: WaitingQueue, skipped: list[SequenceGroup], reserved: int) -> None:
        """Prefetches adapters of the next groups while this step runs. Groups are moved to `skipped`."""
        for _ in range(LOOK_AHEAD - len(skipped)):
            group = waiting.peek()
            if group is None:
                return
            ready = self.prepare(group, reserved, early=True)
            if ready is Readiness.NO_ROOM:
                return
            waiting.skip()
            if ready is not Readiness.FAILED:
                skipped.append(group)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Loads that the next step carries; adapters that were evicted meanwhile are left out."""
        loads = tuple(load for key, load in self._loads.items() if self._pages.is_resident(key))
        for key in self._taken:  # their step was launched before this one was planned
            self._copies.let_go(key)
        self._taken = list(self._loads)
        self._loads.clear()
        return loads

    def take_evicted(self) -> tuple[str, ...]:
        """Adapters whose pages were reused since the last step."""
        return tuple(key for key in self._pages.take_evicted() if not self._pages.is_resident(key))

    def take_failed(self) -> list[tuple[SequenceGroup, AdapterError]]:
        failed, self.failed = self.failed, []
        return failed

    def _check(self, group: SequenceGroup, num_blocks: int) -> None:
        memory = self._memory
        needed = memory.blocks_at_most(group.request) + memory.num_pinned
        if not self._pages.can_ever_hold(num_blocks, needed):
            raise AdapterError(
                f"adapter and request may need {num_blocks} + {needed} blocks, and the pool has "
                f"{memory.num_blocks}: lower max_tokens, or raise kv_cache_memory_bytes"
            )
