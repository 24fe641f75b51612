"""AdapterPages: LoRA weights in blocks of the same pool as K and V (unified paging). Ids only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.memory.blocks import BlockPool


@dataclass(slots=True)
class AdapterPageStats:
    num_queries: int = 0  # rows that began with an adapter
    num_loads: int = 0  # host memory to pages
    num_evictions: int = 0


class AdapterPages:
    """Maps each resident adapter to its blocks.

    An adapter in use holds a reference to each of its blocks. The blocks of an idle adapter are free, at the end of the
    free list and with their content, as those of a finished sequence: an allocation takes the least recently used
    block, of K and V or of an adapter. The first block taken evicts the adapter; until then it can be
    reused, as with a prefix hit.
    """

    def __init__(self, pool: BlockPool, take: Callable[[], int]) -> None:
        self._pool = pool
        self._take = take  # gives a free block, its previous content evicted
        self._blocks: dict[str, list[int]] = {}
        self._users: dict[str, int] = {}  # rows
        self.owner: dict[int, str] = {}  # by block: its adapter
        self._salts: dict[str, str] = {}
        self.num_blocks_in_use = 0
        self.evicted: list[str] = []  # since the last step
        self.stats = AdapterPageStats()

    def is_resident(self, key: str) -> bool:
        return key in self._blocks

    def size_of(self, key: str) -> int:
        """Blocks of a resident adapter."""
        return len(self._blocks[key])

    def has_room(self, num_blocks: int, reserved: int) -> bool:
        """Whether `num_blocks` can be taken while `reserved` stay free."""
        return num_blocks + reserved <= self._pool.num_free

    def has_room_beside(self, num_blocks: int, reserved: int, on_way: int) -> bool:
        """The same, without the `on_way` blocks of idle adapters that were just loaded."""
        return self.has_room(num_blocks, reserved + on_way)

    def has_spare_room(self, num_blocks: int, reserved: int) -> bool:
        """The same without evicting an idle adapter: a prefetch must not cost a resident one."""
        idle = len(self.owner) - self.num_blocks_in_use
        return num_blocks + reserved + idle <= self._pool.num_free

    def can_ever_hold(self, num_blocks: int, others: int) -> bool:
        """Whether an adapter of `num_blocks` and `others` blocks of K and V fit an otherwise empty pool."""
        return num_blocks + others <= self._pool.num_blocks

    def load(self, key: str, num_blocks: int, salt: str) -> list[int]:
        """Takes blocks for an adapter that is not resident; it is idle afterwards. The caller checked `has_room`."""
        blocks = [self._take() for _ in range(num_blocks)]
        self._blocks[key] = blocks
        self._salts[key] = salt
        self.owner.update(dict.fromkeys(blocks, key))
        self.stats.num_loads += 1
        self._free(blocks)
        return blocks

    @contextmanager
    def holding(self, key: str) -> Iterator[None]:
        """Keeps a resident adapter's pages while a group is being admitted."""
        self.acquire(key)
        self.stats.num_queries -= 1
        yield
        self.release(key)

    def acquire(self, key: str) -> None:
        """Counts one more row that runs with the adapter."""
        users = self._users.get(key, 0)
        self.stats.num_queries += 1
        if not users:
            self.num_blocks_in_use += len(self._blocks[key])
            for block in self._blocks[key]:
                self._pool.share(block)
        self._users[key] = users + 1

    def release(self, key: str) -> None:
        users = self._users[key] - 1
        if users:
            self._users[key] = users
        else:
            del self._users[key]
            self.num_blocks_in_use -= len(self._blocks[key])
            self._free(self._blocks[key])

    def evict_owner(self, block: int) -> None:
        """Evicts the idle adapter that the block belongs to: the block was taken for something else."""
        self._evict(self.owner[block])

    def drop(self, key: str) -> None:
        """Removes an adapter that no request can name any more."""
        if key in self._blocks and key not in self._users:
            self._remove(key)
        self._salts.pop(key, None)

    def salt(self, key: str) -> str:
        """Hash of the adapter's weights: separates its K and V from those of other adapters."""
        return self._salts.get(key, key)

    def take_evicted(self) -> tuple[str, ...]:
        evicted, self.evicted = tuple(self.evicted), []
        return evicted

    @property
    def num_resident(self) -> int:
        return len(self._blocks)

    @property
    def num_in_use(self) -> int:
        return len(self._users)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold adapters, idle ones included."""
        return len(self.owner)

    def in_use(self) -> list[str]:
        return list(self._users)

    def count_references(self, counts: list[int]) -> None:
        """Adds the references it holds; raises RuntimeError if its tables disagree."""
        for key in self._users:
            for block in self._blocks[key]:
                counts[block] += 1
        owned = {block: key for key, blocks in self._blocks.items() for block in blocks}
        if owned != self.owner:
            raise RuntimeError("adapters' blocks disagree with their owners")

    def _free(self, blocks: list[int]) -> None:
        for block in blocks:
            self._pool.release(block, keep=True)

    def _evict(self, key: str) -> None:
        self._remove(key)
        self.stats.num_evictions += 1

    def _remove(self, key: str) -> None:
        for block in self._blocks.pop(key):
            del self.owner[block]
        self.evicted.append(key)
