"""Library: every adapter that may be asked for, by name; those in use lie in host memory, the others on disk."""

import os
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.adapters.peft import WEIGHTS, PackedAdapter, Reader, read_config
from quire.adapters.settings import read_settings
from quire.adapters.sites import Sites
from quire.core.adapters import CONFIG_FILE
from quire.core.errors import AdapterError
from quire.observe.logs import get_logger

logger = get_logger(__name__)

NAMED = 5  # known adapters that an error names
# Being read at a time, at least and for each thread: they are asked for once per step, which is several reads long.
LOADING, LOADING_PER_THREAD = 8, 8


@dataclass(frozen=True, slots=True)
class HostLimits:
    """How much of host memory copies may take. One copy is always allowed."""

    num_bytes: int
    num_adapters: int | None = None


@dataclass(slots=True)
class AdapterStoreStats:
    num_loads: int = 0  # from disk to host memory
    load_seconds: float = 0.0
    num_failures: int = 0
    num_dropped: int = 0  # host copies that made room for others


@dataclass(slots=True, eq=False)
class Entry:
    """One content under a name. A changed or reloaded adapter is another entry with a key of its own."""

    key: str
    name: str
    folder: Path | None  # None: given from memory, and always there
    signature: tuple[int, ...] = ()  # of the files, to see that they changed
    packed: PackedAdapter | None = None
    content: str | None = None  # known once it was loaded
    num_blocks: int | None = None
    rank: int = 0
    error: AdapterError | None = None
    loading: Future[PackedAdapter] | None = None
    num_users: int = 0  # requests that are not done
    retired: bool = field(default=False)  # its name means something else by now, or nothing

    @property
    def file_bytes(self) -> int:
        return self.signature[4] if self.signature else 0


class AdapterStore:
    """Used by the engine's thread alone; files are read in threads of its own."""

    def __init__(
        self,
        reader: Reader,
        limits: HostLimits,
        folder: Path | None = None,
        num_threads: int = 1,
        disk: Executor | None = None,
    ) -> None:
        """`disk` reads files in the place of threads."""
        self._reader = reader
        self.limits = limits
        self._folder = folder.resolve() if folder is not None else None
        self._names: dict[str, Entry] = {}
        self._entries: dict[str, Entry] = {}  # by key
        # With a host copy from disk, least recently used first.
        self._held: OrderedDict[str, Entry] = OrderedDict()
        self._held_bytes = 0
        self._needed: dict[str, int] = {}  # copies that a step is about to make, and how often
        self._num_made = 0
        alone = partial(torch.set_num_threads, 1) if num_threads > 1 else None  # each does its own work
        self._threads = disk or ThreadPoolExecutor(
            num_threads, thread_name_prefix="quire-adapters", initializer=alone
        )
        self._max_loading = max(LOADING_PER_THREAD * num_threads, LOADING)
        self._loading: dict[str, int] = {}  # keys, and the bytes of their files
        self._retired: list[str] = []  # keys that nobody uses any more
        self.stats = AdapterStoreStats()

    # ------------------------------------------------------------------ names

    def names(self) -> list[str]:
        """Every name that can be asked for, those of the folder included."""
        found = dict.fromkeys(self._names)
        if self._folder is not None:
            with suppress(OSError), os.scandir(self._folder) as entries:  # it may be gone by now
                inside = sorted(e.name for e in entries if os.path.exists(os.path.join(e.path, CONFIG_FILE)))
                found |= dict.fromkeys(inside)
        return list(found)

    def register_named(self, modules: Mapping[str, str]) -> None:
        """Those of the config. One that is gone, since an engine before this one was started, stops no other."""
        for name, path in modules.items():
            try:
                self.register(name, Path(path))
            except AdapterError as error:
                logger.warning("%s: requests that name it are refused", error)

    def register(self, name: str, folder: Path) -> None:
        """Names a folder without reading it yet."""
        if not folder.is_dir():
            raise AdapterError(f"adapter {name!r}: there is no folder {folder}")
        self._set(name, Entry(self._new_key(name), name, folder, _signature(folder)))

    def folder_at(self, name: str, path: str) -> Path:
        """The folder that a path means which someone sent. AdapterError unless it lies inside the allowed one."""
        if self._folder is None:
            raise AdapterError(
                "adapters can be loaded at run time only from a folder that lora_dir names: set it",
                "lora_path",
            )
        folder = Path(path)
        folder = (folder if folder.is_absolute() else self._folder / folder).resolve()
        if not folder.is_relative_to(self._folder) or folder == self._folder:
            raise AdapterError(
                f"{path} is outside the folder that adapters may be loaded from: see lora_dir", "lora_path"
            )
        if not folder.is_dir():
            raise AdapterError(f"adapter {name!r}: there is no folder {path}", "lora_path")
        return folder

    def prepare(self, name: str, folder: Path) -> str:
        """The key of what the folder holds, for `want` to read. The name does not mean it before `publish`."""
        entry = Entry(self._new_key(name), name, folder, _signature(folder))
        self._entries[entry.key] = entry
        return entry.key

    def publish(self, key: str) -> None:
        """From now on the name means what was prepared under this key."""
        entry = self._entries[key]
        self._set(entry.name, entry)

    def discard(self, key: str) -> None:
        """What was prepared is not wanted any more."""
        self._retire(self._entries[key])

    def add(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """From memory: checked and packed at once, never written to disk, kept until it is removed."""
        packed = self._reader.read_tensors(name, tensors, config)
        entry = Entry(self._new_key(name), name, None)
        self._note(entry, packed)
        entry.packed = packed
        self._set(name, entry)

    def remove(self, name: str) -> None:
        """Requests that run with it go on; new ones do not find it."""
        entry = self._names.pop(name, None)
        if entry is None:
            raise AdapterError(self._unknown(name), "lora_name")
        self._retire(entry)

    def resolve(self, name: str) -> str:
        """The key of what the name means now. AdapterError if it is unknown or cannot be served."""
        entry = self._names.get(name)
        if entry is None:
            entry = self._find(name)
        elif entry.folder is not None:
            signature = _signature(entry.folder)
            if signature and signature != entry.signature:  # another content by now
                entry = Entry(self._new_key(name), name, entry.folder, signature)
                self._set(name, entry)
        if entry.error is not None:
            raise entry.error.again()
        return entry.key

    def name_of(self, key: str) -> str:
        return self._entries[key].name

    def targets(self, count: int) -> set[str]:
        """Modules that some of the known adapters add to, as their configs say; for what is prepared at start."""
        found: set[str] = set()
        for entry in list(self._names.values())[:count]:
            if entry.folder is not None:
                try:
                    found.update(
                        read_settings(entry.name, read_config(entry.name, entry.folder)).target_modules
                    )
                except AdapterError:
                    continue
        return found

    # ------------------------------------------------------------------ requests

    def begin(self, key: str) -> None:
        self._entries[key].num_users += 1

    def end(self, key: str) -> None:
        entry = self._entries[key]
        entry.num_users -= 1
        if entry.retired and not entry.num_users:
            self._drop(entry)

    # ------------------------------------------------------------------ host copies

    def want(self, key: str) -> PackedAdapter | None:
        """The host copy, or None while it is being read. AdapterError if that failed."""
        entry = self._entries[key]
        if entry.packed is not None:
            if entry.folder is not None:
                self._held.move_to_end(key)
            return entry.packed
        if entry.error is not None:
            raise entry.error.again()
        if entry.loading is None:
            if not self._may_load(entry):
                self._take_forgotten()
            if entry.folder is not None and self._may_load(entry):
                self._loading[key] = entry.file_bytes
                entry.loading = self._threads.submit(self._reader.read_folder, entry.name, entry.folder)
            return None
        if not entry.loading.done():
            return None
        return self._take(entry)

    def hold(self, key: str) -> None:
        """The copy in host memory stays until it is let go, whatever the limits say."""
        self._needed[key] = self._needed.get(key, 0) + 1

    def let_go(self, key: str) -> None:
        count = self._needed.pop(key, 0) - 1
        if count > 0:
            self._needed[key] = count

    def content(self, key: str) -> str:
        """What the adapter computes, as a hash; known once it was loaded."""
        return self._entries[key].content or ""

    def loading(self) -> list[Future[PackedAdapter]]:
        """What is being read."""
        futures = (self._entries[key].loading for key in self._loading if key in self._entries)
        return [future for future in futures if future is not None]

    def take_retired(self) -> list[str]:
        """Keys that nobody will ask for again."""
        retired, self._retired = self._retired, []
        return retired

    @property
    def sites(self) -> Sites:
        """Where adapters of this model can be attached."""
        return self._reader.sites

    @property
    def num_names(self) -> int:
        return len(self._names)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _may_load(self, entry: Entry) -> bool:
        """What is being read, or was and nobody took it yet, is bounded as copies are. One file is always allowed."""
        loading = sum(self._loading.values())
        fits = not loading or loading + entry.file_bytes <= self.limits.num_bytes
        return fits and len(self._loading) < self._max_loading

    def _take_forgotten(self) -> None:
        """Reads that are done and that nobody asks for any more, since their requests were aborted: others may read."""
        for key in list(self._loading):
            entry = self._entries[key]
            if entry.loading is not None and entry.loading.done():
                with suppress(AdapterError):  # whoever asks next is told
                    self._take(entry)

    def _take(self, entry: Entry) -> PackedAdapter:
        assert entry.loading is not None
        loading, entry.loading = entry.loading, None
        self._loading.pop(entry.key, None)
        try:
            packed = loading.result()
            if entry.content is not None and packed.content != entry.content:
                raise AdapterError(
                    f"adapter {entry.name!r} changed on disk while it was being served: send the request again"
                )
        except AdapterError as error:
            entry.error = error.again()  # the one that was caught keeps the bytes that were read
        except Exception as error:
            entry.error = AdapterError(f"adapter {entry.name!r} cannot be read: {error!r}")
        if entry.error is not None:
            self.stats.num_failures += 1
            raise entry.error.again()
        self._keep(entry, packed)
        return packed

    def _keep(self, entry: Entry, packed: PackedAdapter) -> None:
        self._note(entry, packed)
        entry.packed = packed
        self._held[entry.key] = entry
        self._held_bytes += packed.num_bytes
        self.stats.num_loads += 1
        most = self.limits.num_adapters
        for other in list(self._held.values()):
            if self._held_bytes <= self.limits.num_bytes and (most is None or len(self._held) <= most):
                break
            if other is not entry and other.key not in self._needed:
                self._let_go(other)
                self.stats.num_dropped += 1

    @staticmethod
    def _note(entry: Entry, packed: PackedAdapter) -> None:
        entry.content, entry.num_blocks, entry.rank = packed.content, packed.num_blocks, packed.rank

    def _let_go(self, entry: Entry) -> None:
        if entry.key in self._held and entry.packed is not None:
            del self._held[entry.key]
            self._held_bytes -= entry.packed.num_bytes
        entry.packed = None

    # ------------------------------------------------------------------ entries

    def _set(self, name: str, entry: Entry) -> None:
        before = self._names.get(name)
        self._names[name] = entry
        self._entries[entry.key] = entry
        if before is not None:
            self._retire(before)

    def _retire(self, entry: Entry) -> None:
        entry.retired = True
        if not entry.num_users:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._let_go(entry)
        if entry.loading is not None:
            entry.loading.cancel()  # nobody will take it; one that has begun cannot be stopped
        self._loading.pop(entry.key, None)
        self._entries.pop(entry.key, None)
        self._retired.append(entry.key)

    def _find(self, name: str) -> Entry:
        """In the folder of adapters, whose entries are known only once they are asked for."""
        if self._folder is not None and name not in (".", "..") and "/" not in name and "\0" not in name:
            folder = self._folder / name
            if (folder / CONFIG_FILE).is_file() and folder.resolve().is_relative_to(self._folder):
                entry = Entry(self._new_key(name), name, folder, _signature(folder))
                self._set(name, entry)
                return entry
        raise AdapterError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        known = list(self._names)
        some = ", ".join(known[:NAMED]) + (", …" if len(known) > NAMED else "")
        return f"there is no adapter {name!r}" + (f": known are {some}" if known else "")

    def _new_key(self, name: str) -> str:
        self._num_made += 1
        return f"{name}@{self._num_made}"


def _signature(folder: Path) -> tuple[int, ...]:
    """Changes when the files do; empty if they are not there."""
    found: list[int] = []
    for name in (CONFIG_FILE, WEIGHTS):
        try:
            status = os.stat(folder / name)
        except OSError:
            return ()
        found += (status.st_mtime_ns, status.st_size, status.st_ino)
    return tuple(found)
