"""load_offloaded: a model some of whose layers live in pinned host memory or on disk and are streamed in each step.

Loading never holds more than the weights that stay, the layers being filled and one more: a layer is moved out as soon
as its last tensor is loaded.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import huge_pages
from quire.layers.factory import LayerFactory
from quire.layers.parameters import Loader, Stateful, collect, distribute
from quire.layers.streaming import (
    CopyStream,
    CudaCopyStream,
    FileTransfer,
    LayerLayout,
    LayerTransfer,
    PinnedMemory,
    PinnedTransfer,
    Ring,
    StagedTransfer,
)
from quire.models.expert_placement import (
    ExpertPlacement,
    experts_away,
    map_experts,
    mixtures_of,
    moves_experts,
)
from quire.models.loading import Progress, feed
from quire.models.model import DecoderModel, Layer
from quire.models.registry import build, describe
from quire.observe.heap import release_freed
from quire.quant.encoded import Weight
from quire.weights.layer_files import LayerFiles
from quire.weights.source import Source

GIB = 1 << 30
DEVICE_BUFFERS = 3  # one in use, one arriving, one so that the link stays busy while a layer takes longer
HOST_BUFFERS = 2  # one in use, one being read
STAGING_BUFFERS = 2  # one being read, one being copied to the device
LAYERS = "layers."  # how models name their layers' parameters
OUTSIDE = -1  # the file of all parameters outside the layers
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")  # the only number in a decoder's tensor names


@dataclass(frozen=True, slots=True)
class Offload:
    """The user's limits, in bytes."""

    device_bytes: int  # of layers moved out of the GPU; 0 on a CPU
    memory_bytes: int | None  # of host memory for weights; None: no limit
    folder: Path  # for layers beyond that
    host_bytes: int  # of host memory that is free now


class StreamedLayer:
    """A layer in its model's stack whose weights are streamed: its tensors are views of its ring buffer."""

    def __init__(self, layer: Layer, index: int, ring: Ring) -> None:
        self._layer = layer
        self._index = index
        self._ring = ring

    def attend(self, *arguments: Any) -> Tensor:
        self._ring.begin(self._index)
        return self._layer.attend(*arguments)

    def finish(self, *arguments: Any) -> Any:
        result = self._layer.finish(*arguments)
        self._ring.end(self._index)
        return result

    def layers(self) -> dict[str, Stateful]:
        return self._layer.layers()


@dataclass(frozen=True, slots=True)
class Streaming:
    """Where a model's layers live and what a step copies, as decided at loading."""

    num_layers: int
    layer_bytes: int
    pinned: tuple[int, ...]  # layers in pinned host memory
    on_disk: tuple[int, ...]  # layers in files
    folder: str  # of these files
    ring: Ring
    bytes_per_second: float  # of copying layers, measured at start
    kept_bytes: int  # of weights that are always in memory, buffers not counted

    @property
    def step_bytes(self) -> int:
        """Bytes that every step copies."""
        return self.ring.num_streamed * self.layer_bytes

    @property
    def step_seconds(self) -> float:
        """Lower bound of a step's time."""
        return self.step_bytes / self.bytes_per_second

    @property
    def buffer_bytes(self) -> int:
        return self.ring.num_buffers * self.layer_bytes


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers, evenly through the depth: the layers between them give each copy time."""
    return tuple((i + 1) * num_layers // count - 1 for i in range(count))


def is_streamed(model: DecoderModel) -> bool:
    """Whether layers are streamed or experts move: recorded or captured passes could not wait for weights."""
    return any(isinstance(layer, StreamedLayer) for layer in model.stack) or moves_experts(model)


@dataclass(frozen=True, slots=True)
class Loaded:
    model: DecoderModel
    streaming: Streaming | ExpertPlacement | None  # None: all layers stay


def load_offloaded(
    source: Source,
    factory: LayerFactory,
    offload: Offload,
    progress: Progress | None = None,
    seed: int = 0,
    make_copies: Callable[[torch.device], CopyStream] = CudaCopyStream,
) -> Loaded:
    """As `loading.load`. ConfigError or WeightsError if memory, folder or disk are not enough."""
    model = build(describe(source.config), factory)
    shared: dict[str, Any] = {"model": model, "device": factory.device, "offload": offload}
    shared["make_copies"] = make_copies
    if offload.memory_bytes is None:
        if mixtures := mixtures_of(model):
            shape = next(iter(mixtures.values())).shape
            expert_bytes = shape.expert_elements * factory.dtype.itemsize
            num_away = experts_away(offload.device_bytes, expert_bytes, shape.num_experts, len(mixtures))
            if num_away is not None:
                experts = _ExpertPinning(**shared, num_away=num_away, expert_bytes=expert_bytes)
                return Loaded(model, experts.load(source, progress, seed))
        return Loaded(model, _Pinning(**shared).load(source, progress, seed))
    files = LayerFiles(offload.folder, _key(source, factory, seed))
    filing = _Filing(**shared, files=files, memory_bytes=offload.memory_bytes)
    return Loaded(model, filing.load(source, progress, seed))


def num_buffers(num_layers: int, usual: int) -> int:
    """Buffers of a ring for `num_layers`: fewer than layers, or nothing would be saved."""
    return max(1, min(usual, num_layers - 1))


def _key(source: Source, factory: LayerFactory, seed: int) -> str:
    drawn = f" seed {seed} on {factory.device.type}" if source.random else ""
    text = f"{source.fingerprint} {factory.number_format.name} {factory.dtype}{drawn}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _watched(model: DecoderModel, skipped: set[int], complete: Callable[[int], None]) -> dict[str, Loader]:
    """The model's loaders; calls `complete` for each fully loaded layer, and ignores tensors of `skipped` layers."""
    loaders = model.loaders()
    missing: dict[int, set[str]] = {}
    owner = {name: int(match[1]) for name in loaders if (match := _LAYER_NUMBER.search(f".{name}"))}
    for name, layer in owner.items():
        missing.setdefault(layer, set()).add(name)

    def watched(name: str, loader: Loader) -> Loader:
        layer = owner[name]

        def take(tensor: Weight) -> None:
            if layer in skipped:
                return
            loader.take(tensor)
            missing[layer].discard(name)
            if not missing[layer]:
                complete(layer)

        return Loader(loader.shape, take)

    return {name: watched(name, loader) if name in owner else loader for name, loader in loaders.items()}


def _kept_bytes(model: DecoderModel, layout: LayerLayout, num_kept: int) -> int:
    """Bytes of the parameters outside the layers, and of the layers that stay."""
    return sum(t.nbytes for t in _outside(model).values()) + num_kept * layout.num_bytes


def _outside(model: DecoderModel) -> dict[str, Tensor]:
    """All parameters that are in no layer."""
    return {name: t for name, t in model.parameters().items() if not name.startswith(LAYERS)}


def _check_host_memory(wanted: int, offload: Offload) -> None:
    if wanted > offload.host_bytes:
        raise ConfigError(
            f"{wanted / 1e9:.1f} GB of weights do not fit the host's memory, of which "
            f"{offload.host_bytes / 1e9:.1f} GB are free: lower cpu_offload_gb, or set weights_memory_gb and the "
            "rest streams from disk"
        )


def _no_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@dataclass(eq=False, kw_only=True)
class _Placement:
    """Decides where each layer of a model lives while it is loaded."""

    model: DecoderModel
    device: torch.device
    offload: Offload
    make_copies: Callable[[torch.device], CopyStream]
    first_layout: LayerLayout | None = None
    parking: Tensor = field(default_factory=_no_bytes)

    @property
    def num_layers(self) -> int:
        return len(self.model.stack)

    @property
    def _layout(self) -> LayerLayout:
        """The layers' layout, known from the first layer on."""
        assert self.first_layout is not None, "a decoder has a layer"
        return self.first_layout

    def _num_offloaded(self) -> int:
        """Layers that the device's limit moves out."""
        return min(self.num_layers, -(-self.offload.device_bytes // self._layout.num_bytes))

    def _park(self, index: int) -> None:
        """Frees a layer's weights: until they are placed, its tensors are views of a buffer of all parked layers."""
        distribute(self.model.stack[index].layers(), self._layout.views(self.parking))

    def _make_ring(self, transfer: LayerTransfer, layers: tuple[int, ...], usual: int) -> Ring:
        count = num_buffers(len(layers), usual)
        memory = _empty(count * self._layout.num_bytes, self.device).view(count, self._layout.num_bytes)
        return Ring(transfer, memory.unbind(0), layers)

    def _streaming(
        self, pinned: tuple[int, ...], on_disk: tuple[int, ...], folder: str, ring: Ring
    ) -> Streaming:
        """Makes the streamed layers read their weights from the ring's buffers."""
        layout, num_layers = self._layout, self.num_layers
        streamed = sorted(pinned + on_disk)
        for index in streamed:
            layer = self.model.stack[index]
            distribute(layer.layers(), layout.views(ring.buffer(index)))
            self.model.stack[index] = StreamedLayer(layer, index, ring)
        kept = _kept_bytes(self.model, layout, num_layers - len(streamed))
        return Streaming(num_layers, layout.num_bytes, pinned, on_disk, folder, ring, ring.fill(), kept)


@dataclass(eq=False, kw_only=True)
class _Pinning(_Placement):
    """Moves layers to pinned memory one by one. Their number is known when the first is complete."""

    pieces: dict[int, Tensor] = field(default_factory=dict)
    memory: PinnedMemory | None = None

    def load(self, source: Source, progress: Progress | None, seed: int) -> Streaming:
        feed(source, _watched(self.model, set(), self._complete), self.device, progress, seed)
        assert self.memory is not None, "a decoder has a layer"
        layers = tuple(self.pieces)
        transfer = PinnedTransfer(self.make_copies(self.device), self.pieces, self.memory)
        return self._streaming(layers, (), "", self._make_ring(transfer, layers, DEVICE_BUFFERS))

    def _complete(self, index: int) -> None:
        state = collect(self.model.stack[index].layers())
        if self.first_layout is None:
            self._begin(LayerLayout.of(state))
        if index in self.pieces:
            self._layout.fill(self.pieces[index], state)
            self._park(index)

    def _begin(self, layout: LayerLayout) -> None:
        self.first_layout = layout
        count = self._num_offloaded()
        _check_host_memory(count * layout.num_bytes, self.offload)
        self.memory = PinnedMemory(count * layout.num_bytes, self.device)
        pieces = self.memory.pieces(layout.num_bytes)
        self.pieces = dict(zip(spread(count, self.num_layers), pieces, strict=True))
        self.parking = _empty(layout.num_bytes, self.device)


@dataclass(eq=False, kw_only=True)
class _ExpertPinning(_Placement):
    """Moves experts to pinned memory, as many of every layer; all else stays."""

    num_away: int
    expert_bytes: int

    def load(self, source: Source, progress: Progress | None, seed: int) -> ExpertPlacement:
        mixtures, size = mixtures_of(self.model), self.num_away * self.expert_bytes
        num_experts = next(iter(mixtures.values())).shape.num_experts
        _check_host_memory(len(mixtures) * size, self.offload)
        memory, copies = PinnedMemory(len(mixtures) * size, self.device), self.make_copies(self.device)
        pieces = dict(zip(mixtures, memory.pieces(size), strict=True))

        def complete(index: int) -> None:
            if index in pieces:
                mixtures[index].move_experts(pieces[index], self.num_away, copies, memory)

        feed(source, _watched(self.model, set(), complete), self.device, progress, seed)
        return ExpertPlacement(
            num_layers=len(mixtures),
            num_experts=num_experts,
            num_resident=num_experts - self.num_away,
            expert_bytes=self.expert_bytes,
            where="in pinned host memory",
            kept_bytes=sum(t.nbytes for t in self.model.parameters().values()) - len(mixtures) * size,
            pass_bytes=0,
        )


@dataclass(eq=False, kw_only=True)
class _Filing(_Placement):
    """Writes every layer to a file; then reads as many as memory allows back for good."""

    files: LayerFiles
    memory_bytes: int
    staging: Tensor = field(default_factory=_no_bytes)

    def load(
        self, source: Source, progress: Progress | None, seed: int
    ) -> Streaming | ExpertPlacement | None:
        self.files.make_folder()
        there = self._already_there()
        if len(there) < self.num_layers or not self._adopt_outside():
            feed(source, _watched(self.model, there, self._complete), self.device, progress, seed)
            self._keep_outside()
            self._adopt_outside()  # a copy of its own: until here they share huge pages with layers that were moved out
        self.staging = self.parking = _no_bytes()
        release_freed()  # memory that loading took does not count against the limit
        return self._settle_on_gpu() if self.offload.device_bytes else self._settle_on_cpu()

    def _already_there(self) -> set[int]:
        """Layers with a valid file of an earlier start."""
        valid: set[int] = set()
        for index in range(self.num_layers):
            described = self.files.good(index)
            if described is None:
                continue
            layout = LayerLayout.from_json(described)
            if self.first_layout is None:
                self._begin(layout)
            if layout == self._layout:
                valid.add(index)
                self._park(index)
        return valid

    def _adopt_outside(self) -> bool:
        """Takes the parameters outside the layers from their file, so that the source is not read; False if none."""
        described = self.files.good(OUTSIDE)
        if described is None:
            return False
        layout = LayerLayout.from_json(described)
        piece = _empty(layout.num_bytes, torch.device("cpu"))
        self.files.read(OUTSIDE, piece)
        parked = self._layout.views(self.parking)
        parameters = layout.views(piece.to(self.device))
        for index in range(self.num_layers):
            parameters |= {f"{LAYERS}{index}.{name}": tensor for name, tensor in parked.items()}
        self.model.adopt(parameters)
        return True

    def _keep_outside(self) -> None:
        outside = _outside(self.model)
        layout = LayerLayout.of(outside)
        piece = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        layout.fill(piece, outside)
        self.files.write(OUTSIDE, piece, layout.to_json())

    def _complete(self, index: int) -> None:
        state = collect(self.model.stack[index].layers())
        if self.first_layout is None:
            self._begin(LayerLayout.of(state))
        self._layout.fill(self.staging, state)
        self.files.write(index, self.staging, self._layout.to_json())
        self._park(index)

    def _begin(self, layout: LayerLayout) -> None:
        self.first_layout = layout
        self.staging = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self.parking = self.staging.to(self.device)  # on a CPU the same memory
        self.files.check_room(range(self.num_layers), layout.num_bytes)

    def _settle_on_cpu(self) -> Streaming | ExpertPlacement | None:
        """Host memory holds the parameters outside the layers, and all of the layers but some experts where that is
        enough; otherwise some layers, and buffers for the others.
        """
        layout, num_layers = self._layout, self.num_layers
        outside = _kept_bytes(self.model, layout, 0)
        room = self.memory_bytes - outside
        if room >= num_layers * layout.num_bytes:
            self._read_back(range(num_layers))
            return None
        placed = map_experts(self.model, layout, self.files, self.memory_bytes, outside)
        if placed is not None:
            return placed
        num_kept = room // layout.num_bytes - HOST_BUFFERS
        if num_kept < 0:
            least = HOST_BUFFERS * layout.num_bytes - room + self.memory_bytes
            raise ConfigError(
                f"weights_memory_gb={self.memory_bytes / GIB:g} is too little for what is always in memory, the "
                f"embeddings, the output head and {HOST_BUFFERS} layers: raise it to "
                f"{math.ceil(least / GIB * 1000) / 1000} or more"
            )
        on_disk = spread(num_layers - num_kept, num_layers)
        self._read_back(set(range(num_layers)) - set(on_disk))
        ring = self._make_ring(FileTransfer(self.files), on_disk, HOST_BUFFERS)
        return self._streaming((), on_disk, str(self.files.folder), ring)

    def _settle_on_gpu(self) -> Streaming:
        """The device holds the layers that cpu_offload_gb leaves there; host memory and files the others."""
        layout, num_layers = self._layout, self.num_layers
        count = self._num_offloaded()
        streamed = spread(count, num_layers)
        room = self.memory_bytes // layout.num_bytes
        num_pinned = count if room >= count else max(0, room - STAGING_BUFFERS)
        on_disk = tuple(streamed[i] for i in spread(count - num_pinned, count))
        pinned = tuple(layer for layer in streamed if layer not in on_disk)
        size = (num_pinned + (STAGING_BUFFERS if on_disk else 0)) * layout.num_bytes
        _check_host_memory(size, self.offload)
        memory = PinnedMemory(size, self.device)
        pieces = memory.pieces(layout.num_bytes)
        pinned_pieces = dict(zip(pinned, pieces, strict=False))
        for index, piece in pinned_pieces.items():
            self.files.read(index, piece)
        self._read_back(set(range(num_layers)) - set(streamed))
        copies = self.make_copies(self.device)
        transfer: LayerTransfer = PinnedTransfer(copies, pinned_pieces, memory)
        if on_disk:
            transfer = StagedTransfer(copies, pinned_pieces, pieces[num_pinned:], memory, self.files)
        folder = str(self.files.folder) if on_disk else ""
        return self._streaming(pinned, on_disk, folder, self._make_ring(transfer, streamed, DEVICE_BUFFERS))

    def _read_back(self, layers: "set[int] | range") -> None:
        """Reads these layers from their files for good."""
        layout = self._layout
        for index in layers:
            piece = _empty(layout.num_bytes, torch.device("cpu"))
            self.files.read(index, piece)
            distribute(self.model.stack[index].layers(), layout.views(piece.to(self.device)))


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8, on a CPU in huge pages."""
    if device.type == "cpu":
        return huge_pages.zeros(num_bytes, dtype=torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
