"""AdapterLoads: adapters that operators load while the engine runs. Files are read beside the steps."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from quire.adapters.store import AdapterStore
from quire.core.errors import AdapterError


@dataclass(frozen=True, slots=True)
class _Load:
    key: str
    ended: Future[None] = field(default_factory=Future)


class AdapterLoads:
    """Loads of one name run one after another, in order: the name means the last adapter that could be read. Until then
    it keeps its meaning, if it has one.

    Used by the engine's thread alone, which also ends the futures.
    """

    def __init__(self, library: AdapterStore) -> None:
        self._library = library
        self._queues: dict[str, deque[_Load]] = {}  # by name; the first of each is being read

    @property
    def num_waiting(self) -> int:
        """Names with unfinished loads."""
        return len(self._queues)

    def start(self, name: str, path: str) -> Future[None]:
        """Ends when requests can name the adapter, or with AdapterError. A path that is not allowed raises at once."""
        load = _Load(self._library.prepare(name, self._library.folder_at(name, path)))
        self._queues.setdefault(name, deque()).append(load)
        return load.ended

    def look(self) -> None:
        """Ends what was read since the last look, or could not be."""
        for name, queue in list(self._queues.items()):
            load = queue[0]
            try:
                if self._library.want(load.key) is None:
                    continue
                self._library.publish(load.key)
                fault = None
            except Exception as error:  # any fault ends this load alone
                self._library.discard(load.key)
                fault = error
            queue.popleft()
            if not queue:
                del self._queues[name]
            _end(load, fault)
            del fault  # or it would keep this frame, which keeps it

    def cancel(self, name: str) -> bool:
        """Cancels all loads under that name; False if there is none."""
        loads = self._queues.pop(name, None) or ()
        for load in loads:
            self._library.discard(load.key)
            _end(load, AdapterError(f"adapter {name!r} was unloaded while it was being loaded"))
        return bool(loads)

    def close(self) -> None:
        """Cancels all loads."""
        for loads in self._queues.values():
            for load in loads:
                load.ended.cancel()
        self._queues.clear()


def _end(load: _Load, fault: Exception | None) -> None:
    if fault is None:
        load.ended.set_result(None)
    else:
        load.ended.set_exception(fault)
