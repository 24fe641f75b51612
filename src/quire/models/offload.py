"""load_offloaded: a model of which some layers live in pinned host memory or on disk and come when it is their turn.

Loading itself never holds more than what stays, the layers that are being filled and one more: a layer leaves as
soon as its last tensor has come.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import huge_pages
from quire.layers.factory import LayerFactory
from quire.layers.parameters import Loader, collect, distribute
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
from quire.models.loading import Progress, feed
from quire.models.model import Layer, Model
from quire.models.registry import build, describe
from quire.models.streamed import StreamedLayer, Streaming, spread
from quire.weights.layer_files import LayerFiles
from quire.weights.source import Source

GIB = 1 << 30
DEVICE_BUFFERS = 3  # one in use, one arriving, one that lets the link go on when a layer takes longer
HOST_BUFFERS = 2  # one in use, one being read
STAGING_BUFFERS = 2  # one being read, one being copied to the device
LAYERS = "layers."  # how models name their layers' parameters
OUTSIDE = -1  # the file of what is no layer
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")  # the only number in a decoder's tensor names


@dataclass(frozen=True, slots=True)
class Offload:
    """What the user asked for, in bytes."""

    device_bytes: int  # of layers that leave the GPU; 0 on a CPU
    memory_bytes: int | None  # of host memory that weights may take; None: all that they need
    folder: Path  # for layers beyond that
    host_bytes: int  # of host memory that can be had now


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Model
    streaming: Streaming | None  # None: all of it stays


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
    if offload.memory_bytes is None:
        pinning = _Pinning(model, factory.device, offload, make_copies)
        return Loaded(model, pinning.load(source, progress, seed))
    files = LayerFiles(offload.folder, _key(source, factory, seed))
    filing = _Filing(model, factory.device, offload, files, make_copies)
    return Loaded(model, filing.load(source, progress, seed))


def num_buffers(num_layers: int, usual: int) -> int:
    """Of a ring for so many layers: with a buffer for each of them nothing would be saved."""
    return max(1, min(usual, num_layers - 1))


def _key(source: Source, factory: LayerFactory, seed: int) -> str:
    drawn = f" seed {seed} on {factory.device.type}" if source.random else ""
    text = f"{source.fingerprint} {factory.number_format.name} {factory.dtype}{drawn}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _watched(model: Model, skipped: set[int], complete: Callable[[int], None]) -> dict[str, Loader]:
    """The model's loaders; `complete` hears of each layer whose tensors have all come, `skipped` ones take none."""
    loaders = model.loaders()
    missing: dict[int, set[str]] = {}
    owner = {name: int(found[1]) for name in loaders if (found := _LAYER_NUMBER.search(f".{name}"))}
    for name, layer in owner.items():
        missing.setdefault(layer, set()).add(name)

    def watched(name: str, loader: Loader) -> Loader:
        layer = owner[name]

        def take(tensor: Tensor) -> None:
            if layer in skipped:
                return
            loader.take(tensor)
            missing[layer].discard(name)
            if not missing[layer]:
                complete(layer)

        return Loader(loader.shape, take)

    return {name: watched(name, loader) if name in owner else loader for name, loader in loaders.items()}


def _stream(model: Model, layout: LayerLayout, ring: Ring, layers: tuple[int, ...]) -> None:
    """From here on these layers are read from the ring's buffers."""
    for index in layers:
        layer = model.stack[index]
        distribute(layer.layers(), layout.views(ring.buffer(index)))
        model.stack[index] = StreamedLayer(layer, index, ring)


def _kept_bytes(model: Model, layout: LayerLayout, num_kept: int) -> int:
    """Of all that is no layer, and of layers that stay."""
    return sum(t.nbytes for t in _outside(model).values()) + num_kept * layout.num_bytes


def _outside(model: Model) -> dict[str, Tensor]:
    """All parameters that are in no layer."""
    return {name: t for name, t in model.parameters().items() if not name.startswith(LAYERS)}


def _check_host_memory(wanted: int, offload: Offload) -> None:
    if wanted > offload.host_bytes:
        raise ConfigError(
            f"{wanted / 1e9:.1f} GB of weights do not fit the host's memory, of which "
            f"{offload.host_bytes / 1e9:.1f} GB are free: lower cpu_offload_gb, or set weights_memory_gb and the "
            "rest streams from disk"
        )


class _Pinning:
    """Layers go to pinned memory one by one. How many is known when the first is complete."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        offload: Offload,
        make_copies: Callable[[torch.device], CopyStream],
    ) -> None:
        self._make_copies = make_copies
        self._model = model
        self._device = device
        self._offload = offload
        self._layout: LayerLayout | None = None
        self._pieces: dict[int, Tensor] = {}
        self._memory: PinnedMemory | None = None
        self._parking = torch.empty(0, dtype=torch.uint8)

    def load(self, source: Source, progress: Progress | None, seed: int) -> Streaming:
        feed(source, _watched(self._model, set(), self._complete), self._device, progress, seed)
        assert self._layout is not None, "a decoder has a layer"
        assert self._memory is not None
        layers, layout = tuple(self._pieces), self._layout
        lane = PinnedTransfer(self._make_copies(self._device), self._pieces, self._memory)
        ring = _make_ring(lane, layout, layers, DEVICE_BUFFERS, self._device)
        _stream(self._model, layout, ring, layers)
        num_layers = len(self._model.stack)
        kept = _kept_bytes(self._model, layout, num_layers - len(layers))
        return Streaming(num_layers, layout.num_bytes, layers, (), "", ring, ring.fill(), kept)

    def _complete(self, index: int) -> None:
        state = collect(self._model.stack[index].layers())
        if self._layout is None:
            self._layout = self._begin(LayerLayout.of(state))
        if index in self._pieces:
            self._layout.fill(self._pieces[index], state)
            _park(self._model.stack[index], self._layout, self._parking)

    def _begin(self, layout: LayerLayout) -> LayerLayout:
        num_layers = len(self._model.stack)
        count = min(num_layers, -(-self._offload.device_bytes // layout.num_bytes))
        _check_host_memory(count * layout.num_bytes, self._offload)
        self._memory = PinnedMemory(count * layout.num_bytes, self._device)
        pieces = self._memory.pieces(layout.num_bytes)
        self._pieces = dict(zip(spread(count, num_layers), pieces, strict=True))
        self._parking = _empty(layout.num_bytes, self._device)
        return layout


class _Filing:
    """Every layer goes to a file first; when all are there, as many as memory allows come back for good."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        offload: Offload,
        files: LayerFiles,
        make_copies: Callable[[torch.device], CopyStream],
    ) -> None:
        self._make_copies = make_copies
        self._model = model
        self._device = device
        self._offload = offload
        self._files = files
        assert offload.memory_bytes is not None, "without a limit nothing needs a file"
        self._memory_bytes = offload.memory_bytes
        self._num_layers = len(model.stack)
        self._found: LayerLayout | None = None
        self._staging = self._parking = torch.empty(0, dtype=torch.uint8)

    @property
    def _layout(self) -> LayerLayout:
        """How every layer lies in memory, known when the first was seen."""
        assert self._found is not None, "a decoder has a layer"
        return self._found

    def load(self, source: Source, progress: Progress | None, seed: int) -> Streaming | None:
        self._files.make_folder()
        there = self._already_there()
        if len(there) < self._num_layers or not self._adopt_outside():
            feed(source, _watched(self._model, there, self._complete), self._device, progress, seed)
            self._keep_outside()
            self._adopt_outside()  # a copy of its own: until here it shares huge pages with layers that have left
        self._staging = self._parking = torch.empty(0, dtype=torch.uint8)
        huge_pages.release_freed()  # what making layers took is not in the limit
        return self._settle_on_gpu() if self._offload.device_bytes else self._settle_on_cpu()

    def _already_there(self) -> set[int]:
        """Layers that an earlier start left in good files."""
        found: set[int] = set()
        for index in range(self._num_layers):
            described = self._files.good(index)
            if described is None:
                continue
            layout = LayerLayout.from_json(described)
            if self._found is None:
                self._begin(layout)
            if layout == self._layout:
                found.add(index)
                _park(self._model.stack[index], layout, self._parking)
        return found

    def _adopt_outside(self) -> bool:
        """Takes what is no layer from its file, so that the source need not be read at all; False without one."""
        described = self._files.good(OUTSIDE)
        if described is None:
            return False
        layout = LayerLayout.from_json(described)
        piece = _empty(layout.num_bytes, torch.device("cpu"))
        self._files.read(OUTSIDE, piece)
        parked = self._layout.views(self._parking)
        parameters = layout.views(piece.to(self._device))
        for index in range(self._num_layers):
            parameters |= {f"{LAYERS}{index}.{name}": tensor for name, tensor in parked.items()}
        self._model.adopt(parameters)
        return True

    def _keep_outside(self) -> None:
        outside = _outside(self._model)
        layout = LayerLayout.of(outside)
        piece = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        layout.fill(piece, outside)
        self._files.write(OUTSIDE, piece, layout.to_json())

    def _complete(self, index: int) -> None:
        state = collect(self._model.stack[index].layers())
        if self._found is None:
            self._begin(LayerLayout.of(state))
        self._layout.fill(self._staging, state)
        self._files.write(index, self._staging, self._layout.to_json())
        _park(self._model.stack[index], self._layout, self._parking)

    def _begin(self, layout: LayerLayout) -> None:
        self._found = layout
        self._staging = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self._parking = self._staging.to(self._device)  # on a CPU the same memory
        self._files.check_room(range(self._num_layers), layout.num_bytes)

    def _settle_on_cpu(self) -> Streaming | None:
        """Memory holds what is no layer, some layers, and buffers for the others."""
        layout, num_layers = self._layout, self._num_layers
        room = self._memory_bytes - _kept_bytes(self._model, layout, 0)
        if room >= num_layers * layout.num_bytes:
            self._bring_home(range(num_layers))
            return None
        num_kept = room // layout.num_bytes - HOST_BUFFERS
        if num_kept < 0:
            least = HOST_BUFFERS * layout.num_bytes - room + self._memory_bytes
            raise ConfigError(
                f"weights_memory_gb={self._memory_bytes / GIB:g} is too little for what is always in memory, the "
                f"embeddings, the output head and {HOST_BUFFERS} layers: raise it to "
                f"{math.ceil(least / GIB * 1000) / 1000} or more"
            )
        on_disk = spread(num_layers - num_kept, num_layers)
        self._bring_home(set(range(num_layers)) - set(on_disk))
        ring = _make_ring(FileTransfer(self._files), layout, on_disk, HOST_BUFFERS, self._device)
        return self._streaming((), on_disk, ring)

    def _settle_on_gpu(self) -> Streaming:
        """The device holds what cpu_offload_gb leaves there; of the others memory holds some, files the rest."""
        layout, num_layers = self._layout, self._num_layers
        count = min(num_layers, -(-self._offload.device_bytes // layout.num_bytes))
        streamed = spread(count, num_layers)
        room = self._memory_bytes // layout.num_bytes
        num_pinned = count if room >= count else max(0, room - STAGING_BUFFERS)
        on_disk = tuple(streamed[i] for i in spread(count - num_pinned, count))
        pinned = tuple(layer for layer in streamed if layer not in on_disk)
        size = (num_pinned + (STAGING_BUFFERS if on_disk else 0)) * layout.num_bytes
        _check_host_memory(size, self._offload)
        memory = PinnedMemory(size, self._device)
        pieces = memory.pieces(layout.num_bytes)
        homes = dict(zip(pinned, pieces, strict=False))
        for index, piece in homes.items():
            self._files.read(index, piece)
        self._bring_home(set(range(num_layers)) - set(streamed))
        copies = self._make_copies(self._device)
        lane: LayerTransfer = PinnedTransfer(copies, homes, memory)
        if on_disk:
            lane = StagedTransfer(copies, homes, pieces[num_pinned:], memory, self._files)
        ring = _make_ring(lane, layout, streamed, DEVICE_BUFFERS, self._device)
        return self._streaming(pinned, on_disk, ring)

    def _bring_home(self, layers: "set[int] | range") -> None:
        """These are read from their files once, and stay."""
        layout = self._layout
        for index in layers:
            piece = _empty(layout.num_bytes, torch.device("cpu"))
            self._files.read(index, piece)
            distribute(self._model.stack[index].layers(), layout.views(piece.to(self._device)))

    def _streaming(self, pinned: tuple[int, ...], on_disk: tuple[int, ...], ring: Ring) -> Streaming:
        layout, num_layers = self._layout, self._num_layers
        streamed = tuple(sorted(pinned + on_disk))
        _stream(self._model, layout, ring, streamed)
        kept = _kept_bytes(self._model, layout, num_layers - len(streamed))
        folder = str(self._files.folder) if on_disk else ""
        return Streaming(num_layers, layout.num_bytes, pinned, on_disk, folder, ring, ring.fill(), kept)


def _park(layer: Layer, layout: LayerLayout, place: Tensor) -> None:
    """Lets go of a layer's weights: until it has a home its tensors lie where all parked ones do."""
    distribute(layer.layers(), layout.views(place))


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8, on a CPU in huge pages."""
    if device.type == "cpu":
        return huge_pages.zeros(num_bytes, dtype=torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _make_ring(
    lane: LayerTransfer, layout: LayerLayout, layers: tuple[int, ...], usual: int, device: torch.device
) -> Ring:
    count = num_buffers(len(layers), usual)
    memory = _empty(count * layout.num_bytes, device).view(count, layout.num_bytes)
    return Ring(lane, memory.unbind(0), layers)
