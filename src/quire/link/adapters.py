"""NamedAdapters: the adapters that a request may name, as the client's side of the link knows them."""

import os
from contextlib import suppress

from quire.core.config import ADAPTER_CONFIG_FILE, AdapterConfig


class NamedAdapters:
    """Adapters of the config and of its folder, and what operators loaded and unloaded since."""

    def __init__(self, config: AdapterConfig) -> None:
        self.enabled = config.enabled
        self.max_adapters = config.max_loras
        self._folder = config.lora_dir
        self._named = dict.fromkeys(config.modules())
        self._loaded: dict[str, str] = {}  # paths, by name
        self._unloaded: set[str] = set()

    def knows(self, name: str) -> bool:
        """An adapter of the folder is looked up on disk each time."""
        if name in self._loaded or (name in self._named and name not in self._unloaded):
            return True
        return self._folder is not None and _is_plain(name) and self._lies_in(self._folder, name)

    def names(self) -> list[str]:
        names = [name for name in self._named if name not in self._unloaded]
        names += self._loaded
        if self._folder is not None:
            with suppress(OSError), os.scandir(self._folder) as entries:  # the folder may be gone by now
                inside = sorted(entry.name for entry in entries)
                names += [name for name in inside if self._lies_in(self._folder, name)]
        return list(dict.fromkeys(names))

    def loaded(self, name: str, path: str) -> None:
        self._loaded[name] = path
        self._unloaded.discard(name)

    def unloaded(self, name: str) -> None:
        self._loaded.pop(name, None)
        if name in self._named:
            self._unloaded.add(name)

    def loaded_paths(self) -> list[tuple[str, str]]:
        """(name, path) of each adapter that a new engine process has to load again."""
        return list(self._loaded.items())

    def unloaded_names(self) -> list[str]:
        """Adapters of the config that a new engine process has to unload again."""
        return list(self._unloaded)

    @staticmethod
    def _lies_in(folder: str, name: str) -> bool:
        return os.path.isfile(os.path.join(folder, name, ADAPTER_CONFIG_FILE))


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
