"""Converted parameters on disk: one safetensors file per model and number format, mapped, never read twice.

A file that is missing, truncated, corrupt or of another layout is written again; a folder that cannot be written costs
one warning.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.kernels.cache_files import replacing
from quire.observe.logs import get_logger
from quire.weights.cache import converted_folder

logger = get_logger(__name__)

LAYOUT_VERSION = 1  # raise it when parameters change their names or meaning
ALIGNMENT = 64  # a vector register, a cache line and a matrix tile's row
SAMPLE_BYTES = 4096
_PADDING = "padding."  # the format allows no holes, so the bytes between two tensors are tensors too
_TYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def converted_path(fingerprint: str, format_name: str) -> Path:
    """Where the parameters of these weights in this format are kept, whether or not they are there."""
    weights = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    kind, _, layout = format_name.partition("-")
    version = hashlib.sha256(f"{layout} {LAYOUT_VERSION}".encode()).hexdigest()[:8]
    return converted_folder() / f"{weights}-{kind}-{version}.safetensors"


def read_converted(path: Path) -> dict[str, Tensor] | None:
    """Every parameter as a view of the mapped file, or None if there is no valid file."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as opened:
            digest = (opened.metadata() or {}).get("digest")
            names = [name for name in opened.keys() if not name.startswith(_PADDING)]  # noqa: SIM118
            parameters = {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        logger.warning("converted weights %s cannot be read and are made again: %s", path, error)
        return None
    if digest != _digest(parameters):
        logger.warning("converted weights %s are corrupt and are made again", path)
        return None
    return parameters


def write_converted(path: Path, parameters: Mapping[str, Tensor]) -> bool:
    """Writes all or nothing, by a temporary file; False, with one warning, if the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            os.fchmod(file.fileno(), 0o644)  # temporary files are private, but a cache may be shared
            _write(file, parameters)
        _remove_older_layouts(path)
    except OSError as error:
        logger.warning("converted weights are not kept, the next start converts again: %s", error)
        return False
    return True


def _remove_older_layouts(path: Path) -> None:
    """The same weights in a layout that this version no longer reads; a process that maps one keeps it."""
    same_weights = path.stem.rpartition("-")[0]
    for other in path.parent.glob(f"{same_weights}-*{path.suffix}"):
        if other != path:
            with suppress(OSError):
                other.unlink()


def _write(file: IO[bytes], parameters: Mapping[str, Tensor]) -> None:
    header: dict[str, object] = {
        "__metadata__": {"digest": _digest(parameters), "layout": str(LAYOUT_VERSION)}
    }
    offset = 0
    for name, tensor in parameters.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end + _padding(end)
        if offset > end:
            header[f"{_PADDING}{name}"] = {
                "dtype": "U8",
                "shape": [offset - end],
                "data_offsets": [end, offset],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * _padding(8 + len(text))
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for tensor in parameters.values():
        file.write(_bytes(tensor))
        file.write(bytes(_padding(tensor.numel() * tensor.element_size())))


def _padding(num_bytes: int) -> int:
    return -num_bytes % ALIGNMENT


def _bytes(tensor: Tensor) -> Any:
    """The tensor's memory as numpy sees it: a buffer, not a copy."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _digest(parameters: Mapping[str, Tensor]) -> str:
    """Over names, types, shapes and both ends of every tensor.

    A whole checksum would read the file at every start; what a crash or a full disk leaves behind is a cut
    file, or pages of zeros, which change the digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(parameters):
        tensor = parameters[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().flatten()
        sample = max(1, SAMPLE_BYTES // tensor.element_size())
        for piece in (flat[:sample], flat[-sample:]):
            if piece.numel():
                digest.update(_bytes(piece))
    return digest.hexdigest()
