"""Reading adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors, or both from memory."""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.adapters.adapter_file import TensorEntry, find_tensors, gather, read_file, tensors_of
from quire.adapters.packing import BlockShape, Matrices, Shards, Tiles, find_places, plan_tiles
from quire.adapters.settings import LoraSettings, check_rank, read_settings
from quire.adapters.sites import Sites
from quire.core.config import ADAPTER_CONFIG_FILE
from quire.core.errors import AdapterError
from quire.kernels import choose, huge_pages
from quire.kernels.lora.records import Places
from quire.kernels.lora_pack.pieces import AdapterPiece, cut, first_wrong
from quire.observe.logs import get_logger
from quire.parallel.wire import Blob

WEIGHTS = "adapter_model.safetensors"
MAX_LAYOUTS = 64  # layouts of adapter files kept, so that their headers are parsed once
_NAMES = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(?:\.[^.]+)?(?:\.weight)?$"
)
_BASE = ".base_layer.weight"
MOSTLY = 0.8  # share of a file's bytes: below it, the adapter does not keep the whole file
logger = get_logger(__name__)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory, ready to be copied into blocks."""

    data: Tensor  # [num_blocks, block_bytes] uint8; with `pieces` [bytes], as its file has them
    tiles: Tiles
    scales: tuple[float, ...]  # [S]
    content: str  # a hash of everything that it computes, or of which file it is: see Reader.hashed
    rank: int  # its largest
    pieces: tuple[AdapterPiece, ...] = ()  # for a device that packs tiles itself

    @property
    def num_blocks(self) -> int:
        return self.tiles.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about an adapter but its numbers: shared by adapters of one shape."""

    matrices: tuple[Matrices, ...]
    tiles: Tiles
    places: Places
    num_bytes: int  # of the file's data
    pieces: tuple[AdapterPiece, ...]

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(m.scale for m in self.matrices)

    @property
    def rank(self) -> int:
        return max(m.a.shape[0] for m in self.matrices)


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns adapters into blocks for one model; in any thread."""

    sites: Sites
    block: BlockShape
    max_rank: int | None = None
    # False: no cache depends on the content, so a file's identity replaces the hash of its numbers.
    hashed: bool = True
    kernel: ModuleType = field(default_factory=partial(choose, "lora_pack", "cpu"), compare=False)
    # Bytes per copy to a device that packs tiles itself; 0: `kernel` packs on the host.
    piece_bytes: int = 0
    base: str = ""  # the model's name
    shards: Shards | None = None  # of this rank; None: adapters are whole
    layouts: OrderedDict[tuple[str, bytes], Layout] = field(default_factory=OrderedDict, compare=False)

    def read_folder(self, name: str, folder: Path) -> PackedAdapter:
        config = read_config_text(name, folder)
        file = read_file(name, folder / WEIGHTS, keep=self.piece_bytes > 0)
        layout = self.layouts.get((config, file.header))
        if layout is not None and layout.num_bytes == len(file.data):
            return self._packed(name, layout, file.data, file.identity)
        settings = self._settings(name, parse_config(name, folder, config))
        entries = {key: e for key, e in find_tensors(name, file).items() if not key.endswith(_BASE)}
        is_odd = self.shards is not None or any(
            e.dtype is torch.float64 or e.offset % e.dtype.itemsize for e in entries.values()
        )
        # PEFT saves the base's own embedding beside an adapter of it: such a file is not kept whole.
        own_bytes = sum(e.num_bytes for e in entries.values())
        has_others = self.piece_bytes > 0 and own_bytes < MOSTLY * len(file.data)
        if is_odd or has_others:
            return self._from_tensors(name, settings, tensors_of(file, entries), file.identity)
        layout = self._layout(name, settings, entries, len(file.data))
        self._remember((config, file.header), layout)
        return self._packed(name, layout, file.data, file.identity)

    def read_tensors(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> PackedAdapter:
        kept = {key: tensor for key, tensor in tensors.items() if not key.endswith(_BASE)}
        return self._from_tensors(name, self._settings(name, config), kept)

    def _settings(self, name: str, config: Mapping[str, Any]) -> LoraSettings:
        """Only warns about another base model: names change when models are copied. Shapes decide."""
        settings = read_settings(name, config)
        if self.base and settings.base and _plain_name(settings.base) != _plain_name(self.base):
            logger.warning(
                "adapter %r was made for %s, and this is %s: it is served where all shapes fit",
                name, settings.base, self.base,
            )  # fmt: skip
        return settings

    def _from_tensors(
        self,
        name: str,
        settings: LoraSettings,
        tensors: Mapping[str, Tensor],
        identity: bytes | None = None,
    ) -> PackedAdapter:
        data, entries = gather(tensors)
        if self.shards is not None:
            return self._shard(name, self.shards, self._matrices(name, settings, entries), data, identity)
        return self._packed(name, self._layout(name, settings, entries, len(data)), data, identity)

    def _shard(
        self, name: str, shards: Shards, whole: tuple[Matrices, ...], data: Tensor, identity: bytes | None
    ) -> PackedAdapter:
        """As many blocks as the rank needs that has most: ids of blocks are those of all."""
        parts = {}
        for m in whole:
            a, b = (data[e.offset : e.offset + e.num_bytes].view(e.dtype).view(e.shape) for e in (m.a, m.b))
            parts[f"{m.site} a"], parts[f"{m.site} b"] = shards.tensors(m, a, b)
        content, entries = gather(parts)
        pairs = [shards.matrices(m, entries[f"{m.site} a"], entries[f"{m.site} b"]) for m in whole]
        matrices = tuple(matrix for pair in pairs for matrix in pair)
        tiles = plan_tiles(name, _shapes(matrices), self.block)
        others = (plan_tiles(name, shards.shapes(whole, rank), self.block) for rank in range(shards.cut.size))
        tiles = replace(tiles, num_blocks=max(other.num_blocks for other in others))
        places = find_places(matrices, tiles, self.block)
        return self._packed(name, Layout(matrices, tiles, places, len(content), ()), content, identity)

    def _remember(self, key: tuple[str, bytes], layout: Layout) -> None:
        self.layouts[key] = layout
        while len(self.layouts) > MAX_LAYOUTS:
            self.layouts.popitem(last=False)

    def _packed(
        self, name: str, layout: Layout, data: Tensor, identity: bytes | None = None
    ) -> PackedAdapter:
        tiles, dtype = layout.tiles, self.block.dtype
        if layout.pieces:
            blocks, wrong = data, first_wrong(data, layout.places, dtype)
        else:
            blocks = huge_pages.own_bytes(tiles.num_blocks, self.block.num_bytes)
            wrong = self.kernel.pack(data, layout.places, blocks.view(-1), dtype)
        if wrong >= 0:
            raise AdapterError(
                f"adapter {name!r} has numbers that are not finite in {'AB'[wrong % 2]} of "
                f"{layout.matrices[wrong // 2].name} (as {dtype}): train or save it again"
            )
        shapes = _shapes(layout.matrices)
        digest = hashlib.sha256(repr((shapes, layout.scales, str(dtype))).encode())
        if layout.pieces:
            digest.update(layout.places.sites.numpy())  # type: ignore[arg-type]  # an array is a buffer
        # Hashing takes longer than reading and packing together.
        digest.update(blocks.view(-1).numpy() if self.hashed or identity is None else identity)  # type: ignore[arg-type]
        return PackedAdapter(blocks, tiles, layout.scales, digest.hexdigest(), layout.rank, layout.pieces)

    def _layout(
        self, name: str, settings: LoraSettings, entries: Mapping[str, TensorEntry], num_bytes: int
    ) -> Layout:
        matrices = self._matrices(name, settings, entries)
        tiles = plan_tiles(name, _shapes(matrices), self.block)
        places = find_places(matrices, tiles, self.block)
        pieces = cut(places, self.piece_bytes) if self.piece_bytes else ()
        return Layout(matrices, tiles, places, num_bytes, pieces)

    def _matrices(
        self, name: str, settings: LoraSettings, tensors: Mapping[str, TensorEntry]
    ) -> tuple[Matrices, ...]:
        pairs: dict[str, dict[str, TensorEntry]] = {}
        for tensor_name, tensor in tensors.items():
            match = _NAMES.match(tensor_name)
            if match is None or tensor.dtype not in _FLOATS:
                raise AdapterError(
                    f"adapter {name!r} has a tensor {tensor_name} of {tensor.dtype}, which is not part of a LoRA"
                )
            pairs.setdefault(match["module"], {})[match["which"] + (match["embedding"] or "")] = tensor
        if not pairs:
            raise AdapterError(f"adapter {name!r} has no weights")
        matrices = [self._matrix(name, settings, module, pair) for module, pair in pairs.items()]
        return tuple(sorted(matrices, key=lambda m: m.site))

    def _matrix(
        self, name: str, settings: LoraSettings, module: str, pair: Mapping[str, TensorEntry]
    ) -> Matrices:
        index = self.sites.find(module)
        if index is None and ".experts" in module:
            raise AdapterError(
                f"adapter {name!r} targets {module}, which belongs to the experts of a mixture: adapters can add to "
                "attention projections and shared experts only"
            )
        if index is None:
            raise AdapterError(
                f"adapter {name!r} targets {module}, which this model does not have: it was made for another "
                f"({settings.base or 'unnamed'})"
            )
        site = self.sites[index]
        kind = "embedding_" if site.is_embedding else ""
        a, b = pair.get("A" + kind), pair.get("B" + kind)
        if a is None or b is None or len(pair) != 2 or len(a.shape) != 2 or len(b.shape) != 2:
            raise AdapterError(
                f"adapter {name!r} has no pair of matrices A and B for {module}: save it again"
            )
        rank = a.shape[0]
        if (a.shape[1], b.shape[0], b.shape[1]) != (site.num_inputs, site.num_outputs, rank):
            raise AdapterError(
                f"adapter {name!r}: at {module} A is {list(a.shape)} and B {list(b.shape)} where this model needs "
                f"[r, {site.num_inputs}] and [{site.num_outputs}, r]: it was made for another "
                f"({settings.base or 'unnamed'})"
            )
        if rank != settings.rank_of(module):
            raise AdapterError(
                f"adapter {name!r} has rank {rank} at {module} and its config says {settings.rank_of(module)}"
            )
        check_rank(name, module, rank, self.max_rank)
        return Matrices(index, module, a, b, settings.scale_of(module))


def _shapes(matrices: tuple[Matrices, ...]) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((m.site, m.a.shape[0], m.a.shape[1], m.b.shape[0]) for m in matrices)


def read_config(name: str, folder: Path) -> Mapping[str, Any]:
    """adapter_config.json; AdapterError if the folder is no adapter."""
    return parse_config(name, folder, read_config_text(name, folder))


def read_config_text(name: str, folder: Path) -> str:
    try:
        return (folder / ADAPTER_CONFIG_FILE).read_text()
    except FileNotFoundError:
        raise AdapterError(
            f"adapter {name!r}: {folder} has no {ADAPTER_CONFIG_FILE}: give the folder that PEFT saved"
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"adapter {name!r}: {folder / ADAPTER_CONFIG_FILE} cannot be read ({error})"
        ) from error


def parse_config(name: str, folder: Path, text: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise AdapterError(
            f"adapter {name!r}: {folder / ADAPTER_CONFIG_FILE} cannot be read ({error})"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(f"adapter {name!r}: {folder / ADAPTER_CONFIG_FILE} is not an object")
    return config


def _plain_name(base: str) -> str:
    """The model's own name in a hub id, a folder or a file name."""
    return base.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".gguf")


# ---------------------------------------------------------------------- to another process


def describe_packed(packed: PackedAdapter) -> Blob:
    """What describes the adapter, as JSON has it, and its bytes."""
    tiles = {field.name: getattr(packed.tiles, field.name) for field in fields(packed.tiles)}
    arrays = {
        name: (value.dtype.str, value.shape, value.ravel().tolist())
        for name, value in tiles.items()
        if isinstance(value, np.ndarray)
    }
    counts = {name: value for name, value in tiles.items() if name not in arrays}
    described = (packed.data.shape, arrays, counts, packed.scales, packed.content, packed.rank)
    return described, packed.data.numpy().tobytes()


def received_packed(blob: Blob, read: Callable[[str, str], PackedAdapter] | None) -> PackedAdapter:
    """As `describe_packed` described it; or `read` from the folder that is named instead."""
    if not blob[1] and read is not None:
        return read(*blob[0])
    (shape, arrays, counts, scales, content, rank), data = blob
    tiles: dict[str, Any] = dict(counts)
    for name, (kind, size, values) in arrays.items():
        tiles[name] = np.array(values, kind).reshape(size)
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(*shape)
    return PackedAdapter(numbers, Tiles(**tiles), tuple(scales), content, rank)
