"""AdapterAdmission: sees to it that a request's adapter lies in pages before the request is admitted."""

from enum import Enum
from typing import Protocol

from quire.core.adapters import AdapterLoad
from quire.core.errors import AdapterError
from quire.core.ints import ints
from quire.memory.interface import Memory
from quire.scheduler.demand import blocks_to_resume
from quire.scheduler.group import SequenceGroup
from quire.scheduler.queue import WaitingQueue

LOOK_AHEAD = 64  # groups in the queue whose adapters are fetched before it is their turn


class HostCopy(Protocol):
    """An adapter in host memory."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def content(self) -> str: ...  # a hash


class HostCopies(Protocol):
    """Where adapters come from."""

    def want(self, key: str) -> HostCopy | None:
        """None while it is being read; AdapterError if it cannot be."""
        ...

    def hold(self, key: str) -> None:
        """It must not be given up: a step is about to copy it."""
        ...

    def let_go(self, key: str) -> None: ...


class Readiness(Enum):
    READY = "ready"  # its weights are in pages before the step runs
    LOADING = "loading"  # on its way: others may go first meanwhile
    NO_ROOM = "no room"  # pages must become free first, and nobody may pass
    FAILED = "failed"


class AdapterAdmission:
    """Pages are taken for an adapter one step before its first row where anything else runs, so that the copy is made
    beside that step. A group whose adapter is being read from disk lets others pass.
    """

    governs_all = False  # whether requests without an adapter must ask too

    def __init__(self, copies: HostCopies, memory: Memory, max_adapters: int | None = None) -> None:
        self._copies = copies
        self._memory = memory
        self._pages = memory.adapter_pages
        self._max_adapters = max_adapters
        self._loads: dict[str, AdapterLoad] = {}  # that no step has carried yet
        self._taken: list[str] = []  # by the newest step
        self.failed: list[tuple[SequenceGroup, AdapterError]] = []  # left the queue; for the engine to end

    def ready(self, group: SequenceGroup, reserved: int, alone: bool) -> Readiness:
        """Whether the group, which is next, could be admitted as far as its adapter goes. See `prepare`."""
        if group.request.adapter is None and not self.governs_all:
            return Readiness.READY
        return self.prepare(group, reserved + blocks_to_resume(self._memory, group), alone)

    def prepare(
        self, group: SequenceGroup, reserved: int, alone: bool = False, early: bool = False
    ) -> Readiness:
        """`reserved` blocks stay free for K and V. `alone`: nothing else would run in this step. `early`: it is not
        the group's turn yet.
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
            self._loads[key] = AdapterLoad(key, ints(blocks))
            self._copies.hold(key)
        return Readiness.LOADING if key in self._loads and not alone else Readiness.READY

    def _has_room(self, num_blocks: int, reserved: int, alone: bool, early: bool) -> bool:
        """Of those who wait only the first may cost an idle adapter, and not one that is on its way for another: they
        would evict each other. Where nothing else would run it may, or nothing ever would.
        """
        pages = self._pages
        if early:
            return pages.has_spare_room(num_blocks, reserved)
        if alone or not self._loads:
            return pages.has_room(num_blocks, reserved)
        in_use = pages.in_use()
        on_way = [load for key, load in self._loads.items() if key not in in_use and pages.is_resident(key)]
        return pages.has_room_beside(num_blocks, reserved, sum(len(load.block_ids) for load in on_way))

    def look_ahead(self, waiting: WaitingQueue, parked: list[SequenceGroup], reserved: int) -> None:
        """Adapters of those next in line come in while this step runs. Groups are moved to `parked`."""
        for _ in range(LOOK_AHEAD - len(parked)):
            group = waiting.peek()
            if group is None:
                return
            ready = self.prepare(group, reserved, early=True)
            if ready is Readiness.NO_ROOM:
                return
            waiting.lay_aside()
            if ready is not Readiness.FAILED:
                parked.append(group)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Those that the next step carries; what was evicted again meanwhile is not loaded at all."""
        loads = tuple(load for key, load in self._loads.items() if self._pages.is_resident(key))
        for key in self._taken:  # their step was launched before this one was planned
            self._copies.let_go(key)
        self._taken = list(self._loads)
        self._loads.clear()
        return loads

    def take_evicted(self) -> tuple[str, ...]:
        """Adapters whose pages are others' by now."""
        return tuple(key for key in self._pages.take_evicted() if not self._pages.is_resident(key))

    def take_failed(self) -> list[tuple[SequenceGroup, AdapterError]]:
        failed, self.failed = self.failed, []
        return failed

    def _check(self, group: SequenceGroup, num_blocks: int) -> None:
        memory = self._memory
        needed = memory.blocks_at_most(group.request) + memory.num_held
        if not self._pages.can_ever_hold(num_blocks, needed):
            raise AdapterError(
                f"adapter and request may need {num_blocks} + {needed} blocks, and the pool has "
                f"{memory.num_blocks}: lower max_tokens, or raise kv_cache_memory_bytes"
            )
