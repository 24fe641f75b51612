"""AdapterLoads: adapters that operators ask for while the engine runs. Their files are read beside the steps."""

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
    """Loads of one name are done one after another, in the order in which they were asked for: the last that could be
    read is what the name means. Until then it means what it meant before, if anything.

    Used by the engine's thread alone, in which futures end too.
    """

    def __init__(self, library: AdapterStore) -> None:
        self._library = library
        self._lines: dict[str, deque[_Load]] = {}  # by name; the first of each is being read

    @property
    def num_waiting(self) -> int:
        """Names that something is being loaded for."""
        return len(self._lines)

    def start(self, name: str, path: str) -> Future[None]:
        """Ends when requests can name the adapter, or with AdapterError. A path that is not allowed raises at once."""
        load = _Load(self._library.prepare(name, self._library.folder_at(name, path)))
        self._lines.setdefault(name, deque()).append(load)
        return load.ended

    def look(self) -> None:
        """Ends what was read since the last look, or could not be."""
        for name, line in list(self._lines.items()):
            load = line[0]
            try:
                if self._library.want(load.key) is None:
                    continue
                self._library.publish(load.key)
                fault = None
            except Exception as error:  # whatever it is, it ends this load and no other
                self._library.discard(load.key)
                fault = error
            line.popleft()
            if not line:
                del self._lines[name]
            _end(load, fault)
            del fault  # or it would keep this frame, which keeps it

    def cancel(self, name: str) -> bool:
        """Gives up what is being loaded under that name; whether there was anything."""
        line = self._lines.pop(name, None) or ()
        for load in line:
            self._library.discard(load.key)
            _end(load, AdapterError(f"adapter {name!r} was unloaded while it was being loaded"))
        return bool(line)

    def close(self) -> None:
        """Nobody will hear of them any more."""
        for line in self._lines.values():
            for load in line:
                load.ended.cancel()
        self._lines.clear()


def _end(load: _Load, fault: Exception | None) -> None:
    if fault is None:
        load.ended.set_result(None)
    else:
        load.ended.set_exception(fault)
