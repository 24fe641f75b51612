"""AdapterStore: every known adapter by name; an LRU cache of packed copies in host memory, the files on disk."""

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
from quire.core.config import ADAPTER_CONFIG_FILE
from quire.core.errors import AdapterError
from quire.observe.logs import get_logger

logger = get_logger(__name__)

NAMED = 5  # known adapters listed by an error
# Concurrent reads, at least and per thread: requests for them come once per step, which takes as long as several reads.
LOADING, LOADING_PER_THREAD = 8, 8


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits of the host copies. One copy is always allowed."""

    num_bytes: int
    num_adapters: int | None = None


@dataclass(slots=True)
class AdapterStoreStats:
    num_loads: int = 0  # from disk to host memory
    num_failures: int = 0
    num_dropped: int = 0  # host copies evicted for others


@dataclass(slots=True, eq=False)
class Entry:
    """One version of an adapter. A changed or reloaded adapter is a new entry with a key of its own."""

    key: str
    name: str
    folder: Path | None  # None: given from memory, never evicted
    signature: tuple[int, ...] = ()  # of the files, to detect changes
    packed: PackedAdapter | None = None
    content: str | None = None  # known once loaded
    error: AdapterError | None = None
    loading: Future[PackedAdapter] | None = None
    num_users: int = 0  # unfinished requests
    retired: bool = field(default=False)  # its name means another entry by now, or none

    @property
    def file_bytes(self) -> int:
        return self.signature[4] if self.signature else 0


class AdapterStore:
    """Used by the engine's thread alone; files are read in a thread pool of its own."""

    def __init__(
        self,
        reader: Reader,
        limits: HostLimits,
        folder: Path | None = None,
        num_threads: int = 1,
        disk: Executor | None = None,
    ) -> None:
        """`disk` replaces the thread pool."""
        self._reader = reader
        self.limits = limits
        self._folder = folder.resolve() if folder is not None else None
        self._names: dict[str, Entry] = {}
        self._entries: dict[str, Entry] = {}  # by key
        # With a host copy from disk, least recently used first.
        self._held: OrderedDict[str, Entry] = OrderedDict()
        self._held_bytes = 0
        self._needed: dict[str, int] = {}  # reference counts of copies that a step will read
        self._num_made = 0
        alone = partial(torch.set_num_threads, 1) if num_threads > 1 else None  # one core each
        self._threads = disk or ThreadPoolExecutor(
            num_threads, thread_name_prefix="quire-adapters", initializer=alone
        )
        self._max_loading = max(LOADING_PER_THREAD * num_threads, LOADING)
        self._loading: dict[str, int] = {}  # keys, and the bytes of their files
        self._retired: list[str] = []  # keys without users
        self.stats = AdapterStoreStats()

    # ------------------------------------------------------------------ names

    def names(self) -> list[str]:
        """All known names, the folder's included."""
        known = dict.fromkeys(self._names)
        if self._folder is not None:
            with suppress(OSError), os.scandir(self._folder) as entries:  # it may be gone by now
                inside = sorted(
                    e.name for e in entries if os.path.exists(os.path.join(e.path, ADAPTER_CONFIG_FILE))
                )
                known |= dict.fromkeys(inside)
        return list(known)

    def register_named(self, modules: Mapping[str, str]) -> None:
        """Registers the config's adapters. A missing folder is logged and skipped: after a restart it may be gone."""
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
        """The folder of a path from a request. AdapterError unless it lies inside the allowed folder."""
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
        """A key for the folder's content, which `want` reads. The name does not refer to it before `publish`."""
        entry = Entry(self._new_key(name), name, folder, _signature(folder))
        self._entries[entry.key] = entry
        return entry.key

    def publish(self, key: str) -> None:
        """Makes the name refer to this prepared key."""
        entry = self._entries[key]
        self._set(entry.name, entry)

    def discard(self, key: str) -> None:
        """Drops a prepared key."""
        self._retire(self._entries[key])

    def add(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Adds an adapter from memory: checked and packed at once, never written to disk, kept until removed."""
        if self._reader.shards is not None:
            raise AdapterError(
                f"adapter {name!r} is given from memory, and with fully_sharded_loras every rank reads its part of a "
                "folder: save it, and name the folder in lora_modules"
            )
        packed = self._reader.read_tensors(name, tensors, config)
        entry = Entry(self._new_key(name), name, None)
        entry.content, entry.packed = packed.content, packed
        self._set(name, entry)

    def remove(self, name: str) -> None:
        """Removes a name. Running requests keep the adapter; new ones do not find it."""
        entry = self._names.pop(name, None)
        if entry is None:
            raise AdapterError(self._unknown(name), "lora_name")
        self._retire(entry)

    def resolve(self, name: str) -> str:
        """The key that the name refers to now. AdapterError if it is unknown or cannot be served."""
        entry = self._names.get(name)
        if entry is None:
            entry = self._find(name)
        elif entry.folder is not None:
            signature = _signature(entry.folder)
            if signature and signature != entry.signature:  # the files changed
                entry = Entry(self._new_key(name), name, entry.folder, signature)
                self._set(name, entry)
        if entry.error is not None:
            raise entry.error.again()
        return entry.key

    def origin(self, key: str) -> tuple[str, str]:
        """The name and folder from which other ranks read their part."""
        entry = self._entries[key]
        return entry.name, str(entry.folder)

    def read(self, name: str, folder: str) -> PackedAdapter:
        """What `want` would keep, at once."""
        return self._reader.read_folder(name, Path(folder))

    def name_of(self, key: str) -> str:
        return self._entries[key].name

    def targets(self, count: int) -> set[str]:
        """Target modules of the first `count` known adapters, for the warm-up."""
        modules: set[str] = set()
        for entry in list(self._names.values())[:count]:
            if entry.folder is not None:
                try:
                    settings = read_settings(entry.name, read_config(entry.name, entry.folder))
                    modules.update(settings.target_modules)
                except AdapterError:
                    continue
        return modules

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
        """The host copy, or None while it is being read; starts the read. AdapterError if that failed."""
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
        """Pins the host copy until `let_go`, even beyond the limits."""
        self._needed[key] = self._needed.get(key, 0) + 1

    def let_go(self, key: str) -> None:
        count = self._needed.pop(key, 0) - 1
        if count > 0:
            self._needed[key] = count

    def content(self, key: str) -> str:
        """The hash of the adapter's content; "" before it was loaded."""
        return self._entries[key].content or ""

    def loading(self) -> list[Future[PackedAdapter]]:
        """Reads in progress."""
        futures = (self._entries[key].loading for key in self._loading if key in self._entries)
        return [future for future in futures if future is not None]

    def take_retired(self) -> list[str]:
        """Keys that will not be requested again."""
        retired, self._retired = self._retired, []
        return retired

    @property
    def sites(self) -> Sites:
        """The model's sites."""
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
        """Bounds reads in progress, and results not yet taken, as copies are bounded. One file is always allowed."""
        loading = sum(self._loading.values())
        fits = not loading or loading + entry.file_bytes <= self.limits.num_bytes
        return fits and len(self._loading) < self._max_loading

    def _take_forgotten(self) -> None:
        """Takes finished reads whose requests were aborted, so that other reads can start."""
        for key in list(self._loading):
            entry = self._entries[key]
            if entry.loading is not None and entry.loading.done():
                with suppress(AdapterError):  # stored in the entry for the next request
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
            # The caught exception's traceback keeps the bytes that were read alive.
            entry.error = error.again()
        except Exception as error:
            entry.error = AdapterError(f"adapter {entry.name!r} cannot be read: {error!r}")
        if entry.error is not None:
            self.stats.num_failures += 1
            raise entry.error.again()
        self._keep(entry, packed)
        return packed

    def _keep(self, entry: Entry, packed: PackedAdapter) -> None:
        entry.content, entry.packed = packed.content, packed
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
            entry.loading.cancel()  # a read that has begun cannot be stopped
        self._loading.pop(entry.key, None)
        self._entries.pop(entry.key, None)
        self._retired.append(entry.key)

    def _find(self, name: str) -> Entry:
        """Finds an adapter in the folder, whose entries are registered on first use."""
        if self._folder is not None and name not in (".", "..") and "/" not in name and "\0" not in name:
            folder = self._folder / name
            if (folder / ADAPTER_CONFIG_FILE).is_file() and folder.resolve().is_relative_to(self._folder):
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
    """Inode, size and time of the files, which change with them; empty if they are missing."""
    signature: list[int] = []
    for name in (ADAPTER_CONFIG_FILE, WEIGHTS):
        try:
            status = os.stat(folder / name)
        except OSError:
            return ()
        signature += (status.st_mtime_ns, status.st_size, status.st_ino)
    return tuple(signature)
