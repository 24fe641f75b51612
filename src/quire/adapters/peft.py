"""Reading adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors, or both from memory."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.adapters.packing import BlockShape, Matrices, Tiles, pack, plan_tiles
from quire.adapters.settings import LoraSettings, check_rank, read_settings
from quire.adapters.sites import Sites
from quire.core.errors import AdapterError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_NAMES = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(?:\.[^.]+)?(?:\.weight)?$"
)
_BASE = ".base_layer.weight"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory, ready to be copied into blocks."""

    blocks: Tensor  # [num_blocks, block_bytes] uint8
    tiles: Tiles
    scales: tuple[float, ...]  # [S]
    content: str  # a hash of everything that it computes
    rank: int  # its largest

    @property
    def num_blocks(self) -> int:
        return self.tiles.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel()


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns adapters into blocks for one model."""

    sites: Sites
    block: BlockShape
    max_rank: int | None = None
    pin: bool = False

    def read_folder(self, name: str, folder: Path) -> PackedAdapter:
        settings = read_settings(name, read_config(name, folder))
        return self._packed(name, settings, _read_tensors(name, folder / WEIGHTS))

    def read_tensors(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> PackedAdapter:
        return self._packed(name, read_settings(name, config), tensors)

    def _packed(self, name: str, settings: LoraSettings, tensors: Mapping[str, Tensor]) -> PackedAdapter:
        matrices = self._matrices(name, settings, tensors)
        shapes = tuple((m.site, m.a.shape[0], m.a.shape[1], m.b.shape[0]) for m in matrices)
        tiles = plan_tiles(name, shapes, self.block)
        blocks = pack(matrices, tiles, self.block, self.pin)
        if not bool(torch.isfinite(blocks.view(-1).view(self.block.dtype).sum())):  # quick; then exactly
            _blame(name, matrices, self.block.dtype)
        scales = tuple(m.scale for m in matrices)
        digest = hashlib.sha256(repr((shapes, scales, str(self.block.dtype))).encode())
        digest.update(blocks.view(-1).numpy())  # type: ignore[arg-type]  # an array is a buffer
        return PackedAdapter(blocks, tiles, scales, digest.hexdigest(), max(m.a.shape[0] for m in matrices))

    def _matrices(self, name: str, settings: LoraSettings, tensors: Mapping[str, Tensor]) -> list[Matrices]:
        found: dict[str, dict[str, Tensor]] = {}
        for tensor_name, tensor in tensors.items():
            if tensor_name.endswith(_BASE):
                continue  # the base's own embedding, which PEFT saves beside an adapter of it
            match = _NAMES.match(tensor_name)
            if match is None or tensor.dtype not in _FLOATS:
                raise AdapterError(
                    f"adapter {name!r} has a tensor {tensor_name} of {tensor.dtype}, which is not part of a LoRA"
                )
            found.setdefault(match["module"], {})[match["which"] + (match["embedding"] or "")] = tensor
        if not found:
            raise AdapterError(f"adapter {name!r} has no weights")
        matrices = [self._matrix(name, settings, module, pair) for module, pair in found.items()]
        return sorted(matrices, key=lambda one: one.site)

    def _matrix(self, name: str, settings: LoraSettings, module: str, pair: Mapping[str, Tensor]) -> Matrices:
        index = self.sites.find(module)
        if index is None:
            raise AdapterError(
                f"adapter {name!r} targets {module}, which this model does not have: it was made for another "
                f"({settings.base or 'unnamed'})"
            )
        site = self.sites[index]
        kind = "embedding_" if site.is_embedding else ""
        a, b = pair.get("A" + kind), pair.get("B" + kind)
        if a is None or b is None or len(pair) != 2 or a.dim() != 2 or b.dim() != 2:
            raise AdapterError(
                f"adapter {name!r} has no pair of matrices A and B for {module}: save it again"
            )
        rank = a.shape[0]
        if (a.shape[1], b.shape[0], b.shape[1]) != (site.num_in, site.num_out, rank):
            raise AdapterError(
                f"adapter {name!r}: at {module} A is {list(a.shape)} and B {list(b.shape)} where this model needs "
                f"[r, {site.num_in}] and [{site.num_out}, r]: it was made for another ({settings.base or 'unnamed'})"
            )
        if rank != settings.rank_of(module):
            raise AdapterError(
                f"adapter {name!r} has rank {rank} at {module} and its config says {settings.rank_of(module)}"
            )
        check_rank(name, module, rank, self.max_rank)
        return Matrices(index, module, a, b, settings.scale_of(module))


def _blame(name: str, matrices: list[Matrices], dtype: torch.dtype) -> None:
    for one in matrices:
        for letter, tensor in (("A", one.a), ("B", one.b)):
            if not bool(torch.isfinite(tensor.to(dtype)).all()):
                raise AdapterError(
                    f"adapter {name!r} has numbers that are not finite in {letter} of {one.name} (as {dtype}): "
                    "train or save it again"
                )


def read_config(name: str, folder: Path) -> Mapping[str, Any]:
    """adapter_config.json; AdapterError if the folder is no adapter."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except FileNotFoundError:
        raise AdapterError(
            f"adapter {name!r}: {folder} has no {CONFIG}: give the folder that PEFT saved"
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: {folder / CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise AdapterError(f"adapter {name!r}: {folder / CONFIG} is not an object")
    return config


def _read_tensors(name: str, path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise AdapterError(
            f"adapter {name!r}: there is no {path.name} in {path.parent}: save it with safe_serialization=True"
        )
    try:
        return load_file(str(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: {path} cannot be read ({error}): copy it again") from error
