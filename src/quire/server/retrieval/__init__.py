"""Files, vector stores and file search of a server. `LazyRetrieval` loads what they need when it is first needed."""

import asyncio
import fcntl
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError
from quire.observe.host import cache_folder
from quire.observe.logs import get_logger
from quire.server.errors import ApiError

if TYPE_CHECKING:
    from quire.server.retrieval.endpoints import Endpoints
    from quire.server.service import Service
    from quire.server.settings import ServerSettings

log = get_logger(__name__)
DATABASE = "quire.db"


def is_file_search(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "file_search"


def has_file_search(tools: Iterable[Mapping[str, Any]] | None) -> bool:
    return tools is not None and any(map(is_file_search, tools))


def data_folder(given: str | None) -> Path:
    return Path(given).expanduser() if given is not None else cache_folder() / "data"


def adapters_folder(data_dir: str | None, model: str | None) -> Path:
    """The folder of the adapters that jobs of a model make, one for each model; made if need be."""
    folder = data_folder(data_dir) / "adapters" / (model or "builtin").rstrip("/").rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def lock_of(folder: Path) -> int:
    """A file descriptor that keeps the folder for this process; ConfigError where another server has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--data-dir {folder}: cannot be written ({error.strerror}): give another folder, or none"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"--data-dir {folder} is in use by another server: give each server a folder of its own"
        ) from None
    return lock


def check_folder(settings: "ServerSettings") -> None:
    """ConfigError if a flag names a folder that cannot be used, before a model is loaded in vain."""
    if settings.keeps_files and settings.data_dir is not None:
        os.close(lock_of(data_folder(settings.data_dir)))


class LazyRetrieval:
    """The data folder of a server, opened by the first request that needs it, or at start if it holds something."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        given = service.settings.data_dir
        self.folder = data_folder(given)
        self._is_default = given is None
        self._lock = asyncio.Lock()
        self._endpoints: Endpoints | None = None

    async def opened(self) -> "Endpoints":
        """Raises 403 where files are off, and 409 where the folder cannot be used."""
        if self._endpoints is not None:
            return self._endpoints
        if not self._service.settings.keeps_files:
            raise ApiError(
                403,
                "files and vector stores are off: start the server with --data-dir FOLDER, and without "
                "--api-server-count",
                code="files_off",
            )
        self._service.refuse_if_draining()
        async with self._lock:
            if self._endpoints is None:
                try:
                    self._endpoints = await _open(self._service, self.folder)
                except ConfigError as error:
                    raise ApiError(409, str(error), code="data_dir_unusable") from None
            return self._endpoints

    async def resume(self) -> None:
        """Goes on with what an earlier server left unfinished. Raises ConfigError for a folder that a flag named."""
        if not self._service.settings.keeps_files:
            return
        if self._is_default and not (self.folder / DATABASE).exists():
            return
        try:
            self._endpoints = await _open(self._service, self.folder)
        except ConfigError as error:
            if not self._is_default:
                raise
            log.warning("files     off for now: %s", error)

    async def close(self) -> None:
        endpoints, self._endpoints = self._endpoints, None
        if endpoints is not None:
            with suppress(asyncio.CancelledError):
                await endpoints.close()


async def _open(service: "Service", folder: Path) -> "Endpoints":
    from quire.server.retrieval.endpoints import Endpoints

    return await Endpoints.open(service, folder)
