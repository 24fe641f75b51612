"""NamedAdapters: which adapters a request may name, as this side of the link knows it."""

import os

from quire.core.adapters import AdapterConfig

CONFIG = "adapter_config.json"


class NamedAdapters:
    """Those of the config, those in its folder, and what operators loaded and unloaded since."""

    def __init__(self, config: AdapterConfig) -> None:
        self.enabled = config.enabled
        self.max_adapters = config.max_loras
        self._folder = config.lora_dir
        self._named = dict.fromkeys(config.modules())
        self._loaded: dict[str, str] = {}  # paths, by name
        self._unloaded: set[str] = set()

    def knows(self, name: str) -> bool:
        """Found on disk when asked for, where it is one of a folder."""
        if name in self._loaded or (name in self._named and name not in self._unloaded):
            return True
        return self._folder is not None and _is_plain(name) and self._lies_in(self._folder, name)

    def names(self) -> list[str]:
        found = dict.fromkeys(name for name in self._named if name not in self._unloaded)
        found |= dict.fromkeys(self._loaded)
        if self._folder is not None:
            with os.scandir(self._folder) as entries:
                inside = sorted(entry.name for entry in entries)
            found |= dict.fromkeys(name for name in inside if self._lies_in(self._folder, name))
        return list(found)

    def loaded(self, name: str, path: str) -> None:
        self._loaded[name] = path
        self._unloaded.discard(name)

    def unloaded(self, name: str) -> None:
        self._loaded.pop(name, None)
        if name in self._named:
            self._unloaded.add(name)

    def loaded_paths(self) -> list[tuple[str, str]]:
        """Names and paths that a new engine must be told."""
        return list(self._loaded.items())

    def unloaded_names(self) -> list[str]:
        """Named in the config, which a new engine reads again."""
        return list(self._unloaded)

    @staticmethod
    def _lies_in(folder: str, name: str) -> bool:
        return os.path.isfile(os.path.join(folder, name, CONFIG))


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
