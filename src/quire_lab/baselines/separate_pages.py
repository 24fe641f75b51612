"""SeparatePages: the baseline of unified paging. Adapters have memory of their own, in contiguous runs."""

from collections import OrderedDict

from quire.memory.adapter_pages import AdapterPages
from quire.memory.blocks import BlockPool
from quire_lab.baselines.contiguous_pool import BlockRun, ContiguousPool


class SeparatePages(AdapterPages):
    """Blocks first … first + count - 1, which K and V never get. An adapter takes one run, first fit; idle adapters
    are evicted, least recently used first, until there is one. Gaps may be too small for an adapter while their sum is
    not, and memory that adapters leave unused is lost.
    """

    def __init__(self, first: int, count: int) -> None:
        super().__init__(BlockPool(0), BlockPool(0).take)
        self._first = first
        self._runs = ContiguousPool(count)
        self._run_of: OrderedDict[str, BlockRun] = OrderedDict()  # least recently used first

    def has_room(self, num_blocks: int, reserved: int) -> bool:
        """Evicts idle adapters until there is a run."""
        while not self._has_run(num_blocks):
            idle = next((key for key in self._run_of if key not in self._users), None)
            if idle is None:
                return False
            self._evict(idle)
        return True

    def has_room_beside(self, num_blocks: int, reserved: int, on_way: int) -> bool:
        """Which run an eviction would free is not known beforehand, so none is evicted."""
        return self.has_spare_room(num_blocks, reserved)

    def has_spare_room(self, num_blocks: int, reserved: int) -> bool:
        return self._has_run(num_blocks)

    def can_ever_hold(self, num_blocks: int, others: int) -> bool:
        return num_blocks <= self._runs.num_blocks

    def load(self, key: str, num_blocks: int, salt: str) -> list[int]:
        run = self._runs.take(num_blocks)
        if run is None:
            raise RuntimeError("load without a run: check has_room first")
        self._run_of[key] = run
        blocks = [self._first - 1 + block for block in run.ids()]
        self._blocks[key] = blocks
        self._salts[key] = salt
        self.owner.update(dict.fromkeys(blocks, key))
        self.stats.num_loads += 1
        return blocks

    def acquire(self, key: str) -> None:
        self.stats.num_queries += 1
        if key not in self._users:
            self.num_blocks_in_use += len(self._blocks[key])
        self._users[key] = self._users.get(key, 0) + 1
        self._run_of.move_to_end(key)

    @property
    def external_fragmentation(self) -> float:
        """Share of free memory outside the largest gap."""
        largest = max((gap.length for gap in self._runs.gaps()), default=0)
        return 1.0 - largest / self._runs.num_free if self._runs.num_free else 0.0

    def count_references(self, counts: list[int]) -> None:
        """Holds no blocks of K and V; its own must add up."""
        if sum(run.length for run in self._run_of.values()) + self._runs.num_free != self._runs.num_blocks:
            raise RuntimeError("adapters' runs and gaps do not add up to their memory")

    def _has_run(self, num_blocks: int) -> bool:
        return any(gap.length >= num_blocks for gap in self._runs.gaps())

    def _free(self, blocks: list[int]) -> None:
        """An idle adapter keeps its run until it is evicted."""

    def _remove(self, key: str) -> None:
        super()._remove(key)
        self._runs.release(self._run_of.pop(key))


def fragmentation(pages: AdapterPages) -> float:
    """External fragmentation of adapter memory: none in unified pages, where any block will do."""
    return pages.external_fragmentation if isinstance(pages, SeparatePages) else 0.0
