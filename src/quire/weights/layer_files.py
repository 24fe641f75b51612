"""LayerFiles: a model's layers on disk, one file each, to be read over and over while the model runs.

A file is a header with what it holds and its checksum, then the bytes. It appears whole or not at all; a file that
was cut or changed since is found when an engine starts, and made again.
"""

import json
import mmap
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.core.errors import WeightsError
from quire.kernels.cache_files import replacing
from quire.observe.logs import get_logger

logger = get_logger(__name__)

VERSION = 2  # raise it when the files change their form or meaning
FIRST_BYTE = 256 << 10  # of the layer; the description comes before: 700 experts in int8 take so much
CHECKED_AT_A_TIME = 1 << 20  # bytes of memory that checking a file takes
MARGIN = 64 << 20  # a disk is not filled to its last byte


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """Layers of one model in one number format; `key` names both."""

    folder: Path
    key: str

    def path(self, layer: int) -> Path:
        """Below zero: what is no layer."""
        name = "outside" if layer < 0 else f"layer-{layer:04d}"
        return self.folder / self.key / f"{name}.weights"

    def make_folder(self) -> None:
        """WeightsError if nothing can be written there."""
        try:
            (self.folder / self.key).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder / self.key):
                pass
        except OSError as error:
            raise WeightsError(
                f"layers cannot be kept in {self.folder} ({error.strerror}): choose another folder with "
                "weights_offload_dir"
            ) from error

    def check_room(self, layers: Iterable[int], num_bytes: int) -> None:
        """WeightsError if the disk cannot take these layers, of `num_bytes` each."""
        wanted = sum(num_bytes + FIRST_BYTE for layer in layers if not self.path(layer).exists())
        free = shutil.disk_usage(self.folder).free
        if wanted + MARGIN > free:
            raise WeightsError(
                f"layers that stream from disk need {wanted / 1e9:.1f} GB in {self.folder}, which has "
                f"{free / 1e9:.1f} GB left: free some, or choose another folder with weights_offload_dir"
            )

    def write(self, layer: int, piece: Tensor, described: list[list[Any]]) -> None:
        """piece [n] uint8 in host memory. All or nothing."""
        data = _bytes_of(piece)
        header = {
            "version": VERSION,
            "key": self.key,
            "layer": layer,
            "num_bytes": len(data),
            "crc32": zlib.crc32(data),
            "parts": described,
        }
        text = json.dumps(header, separators=(",", ":")).encode().ljust(FIRST_BYTE)
        if len(text) > FIRST_BYTE:
            raise WeightsError(
                "a layer has too many tensors to be described at the beginning of its file: choose quantization='none'"
            )
        path = self.path(layer)
        try:
            with replacing(path) as file:
                file.write(text)
                file.write(data)
        except OSError as error:
            raise WeightsError(
                f"layer {layer} cannot be written to {path.parent} ({error.strerror}): free some room, or choose "
                "another folder with weights_offload_dir"
            ) from error

    def read(self, layer: int, piece: Tensor) -> None:
        """Fills piece [n] uint8 in host memory. WeightsError if the file is gone or cut."""
        path = self.path(layer)
        data = _bytes_of(piece)
        try:
            with path.open("rb") as file:
                file.seek(FIRST_BYTE)
                done = file.readinto(data)
        except OSError as error:
            raise WeightsError(
                f"layer {layer} cannot be read from {path} ({error.strerror}): start again, which rewrites it"
            ) from error
        if done < len(data):
            raise WeightsError(
                f"{path} ends after {done:,} of {len(data):,} bytes: start again, which rewrites it"
            )

    def mapped(self, layer: int) -> mmap.mmap:
        """The whole file; the layer begins at FIRST_BYTE. Changes of it are not written back."""
        with self.path(layer).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def good(self, layer: int) -> list[list[Any]] | None:
        """How the layer lies in its file, or None if there is none that can be trusted; reads all of it."""
        path = self.path(layer)
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(FIRST_BYTE))
                wanted = [VERSION, self.key, layer, path.stat().st_size - FIRST_BYTE]
                read = [header.get(name) for name in ("version", "key", "layer", "num_bytes")]
                checksum, data = 0, memoryview(bytearray(CHECKED_AT_A_TIME))
                while count := file.readinto(data):
                    checksum = zlib.crc32(data[:count], checksum)
            parts: list[list[Any]] = header["parts"]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            logger.warning("%s cannot be read and is made again: %s", path, error)
            return None
        if read != wanted or checksum != header.get("crc32"):
            logger.warning("%s was cut or changed and is made again", path)
            return None
        return parts


def _bytes_of(piece: Tensor) -> memoryview:
    """A view, not a copy."""
    array: Any = piece.numpy()
    return memoryview(array)
