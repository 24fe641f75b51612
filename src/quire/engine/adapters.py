"""Adapters: resolves names on arrival, counts requests per adapter, loads and unloads adapters for operators."""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.adapters.store import AdapterStore
from quire.core.errors import AdapterError
from quire.core.stats import AdapterStats
from quire.engine.policies import make_adapter_admission
from quire.memory.paged import PagedMemory

NAMES_SECONDS = 0.5  # how old the names among the stats may be
MAX_NAMES = 100
LOADING_WAIT = 0.005  # seconds that an idle engine waits for a file at a time


@dataclass(frozen=True, slots=True)
class _Load:
    key: str
    ended: Future[None] = field(default_factory=Future)

    def end(self, fault: Exception | None) -> None:
        if fault is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(fault)


class Adapters:
    """One engine's adapters. The scheduler asks its `admission`.

    Operators load adapters while the engine runs, and files are read beside the steps. Loads of one name run one after
    another, in order: the name means the last adapter that could be read. Until then it keeps its meaning, if it has
    one. The engine's thread alone calls this, and ends the futures.
    """

    def __init__(
        self, library: AdapterStore, memory: PagedMemory, max_adapters: int | None = None, merge: bool = False
    ) -> None:
        self.library = library
        self.admission = make_adapter_admission(library, memory, max_adapters, merge)
        self._loads: dict[str, deque[_Load]] = {}  # by name; the first of each is being read
        self._memory = memory
        self._pages = memory.adapter_pages
        self._keys: dict[str, str] = {}  # by request
        self._named_at = 0.0
        self._last_names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def arrive(self, request_id: str, name: str) -> str:
        """The key of the adapter that the request will run with. AdapterError if there is none."""
        key = self.library.resolve(name)
        self.library.begin(key)
        self._keys[request_id] = key
        return key

    def end(self, request_id: str) -> None:
        key = self._keys.pop(request_id, None)
        if key is not None:
            self.library.end(key)
            self._drop_retired()

    def add(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.library.add(name, tensors, config)
        self._drop_retired()

    def load(self, name: str, path: str) -> Future[None]:
        """Ends in a later step: requests can name it, or AdapterError. A path that is not allowed raises at once."""
        load = _Load(self.library.prepare(name, self.library.folder_at(name, path)))
        self._loads.setdefault(name, deque()).append(load)
        return load.ended

    def restore(self, name: str, path: str) -> None:
        """As `load`, for an adapter that was loaded before: requests may name it at once and wait for its file."""
        self.library.register(name, self.library.folder_at(name, path))
        self._drop_retired()

    def remove(self, name: str) -> None:
        """Cancels loads under that name too."""
        loads = self._loads.pop(name, None) or ()
        for load in loads:
            self.library.discard(load.key)
            load.end(AdapterError(f"adapter {name!r} was unloaded while it was being loaded"))
        try:
            self.library.remove(name)
        except AdapterError:
            if not loads:
                raise
        self._drop_retired()

    @property
    def are_loading(self) -> bool:
        """Whether a load is unfinished."""
        return bool(self._loads)

    def finish_loads(self) -> None:
        """Ends loads whose files were read, or could not be."""
        if not self._loads:
            return
        for name, queue in list(self._loads.items()):
            load = queue[0]
            try:
                if self.library.want(load.key) is None:
                    continue
                self.library.publish(load.key)
                fault = None
            except Exception as error:  # any fault ends this load alone
                self.library.discard(load.key)
                fault = error
            queue.popleft()
            if not queue:
                del self._loads[name]
            load.end(fault)
            del fault  # or it would keep this frame, which keeps it
        self._drop_retired()

    def wait(self) -> None:
        """Waits a moment for a file, if some are being read."""
        loading = [future for future in self.library.loading() if not future.done()]
        if loading:
            wait(loading, timeout=LOADING_WAIT, return_when=FIRST_COMPLETED)

    def stats(self) -> AdapterStats:
        pages, library, memory = self._pages, self.library, self._memory
        running, waiting = self._names()
        num_uses, num_loads = pages.stats.num_queries, pages.stats.num_loads
        return AdapterStats(
            num_names=library.num_names,
            num_blocks_kv=memory.num_blocks - memory.num_free - pages.num_blocks_in_use,
            num_blocks=pages.num_blocks,
            num_blocks_in_use=pages.num_blocks_in_use,
            num_in_pages=pages.num_resident,
            num_in_use=pages.num_in_use,
            num_on_host=library.num_held,
            host_bytes=library.held_bytes,
            num_reads=library.stats.num_loads,
            num_failures=library.stats.num_failures,
            num_loads=num_loads,
            num_evictions=pages.stats.num_evictions,
            num_uses=num_uses,
            hit_rate=max(0, num_uses - num_loads) / max(1, num_uses),
            running=running,
            waiting=waiting,
        )

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Some names of adapters that run and that requests wait for; cached for NAMES_SECONDS."""
        now = time.monotonic()
        if now - self._named_at > NAMES_SECONDS or not self._keys:
            self._named_at = now
            running = set(self._pages.in_use())
            asked = set(self._keys.values())
            self._last_names = self._some(asked & running), self._some(asked - running)
        return self._last_names

    def _some(self, keys: set[str]) -> tuple[str, ...]:
        return tuple(sorted({self.library.name_of(key) for key in keys})[:MAX_NAMES])

    def close(self) -> None:
        for loads in self._loads.values():
            for load in loads:
                load.ended.cancel()
        self._loads.clear()
        self.library.close()

    def _drop_retired(self) -> None:
        for key in self.library.take_retired():
            self._pages.drop(key)
