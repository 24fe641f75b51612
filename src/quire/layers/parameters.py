"""Parameters of layers: loading them from checkpoint tensors, and all of a model's under one flat set of names."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.core.errors import WeightsError
from quire.layers.lora import LoraBatch, LoraGroup
from quire.quant.encoded import Weight, floats


class Adaptable:
    """A layer whose result adapters can add to."""

    def __init__(self) -> None:
        self._lora: LoraGroup | None = None

    def take_lora(self, group: LoraGroup) -> None:
        """From now on adds the rows' adapters at these sites to the result."""
        self._lora = group

    def state(self) -> dict[str, Tensor]:
        """Its own tensors, by name; views, not copies."""
        raise NotImplementedError

    def _adapted(self, lora: LoraBatch) -> LoraGroup | None:
        """The layer's sites, if some row has an adapter there."""
        return self._lora if lora.adds_to(self._lora) else None


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Rows of a layer that one checkpoint matrix fills: a site of adapters."""

    layer: Adaptable
    first_row: int
    num_outputs: int
    num_inputs: int
    is_embedding: bool = False  # inputs are ids
    module: str = ""  # the module's name, if the tensor belongs to another


@dataclass(frozen=True, slots=True)
class Loader:
    """Where one checkpoint tensor of `shape` goes: converts and copies a tensor of any float type, or encoded rows."""

    shape: tuple[int, ...]
    take: Callable[[Weight], None]
    parts: tuple[LayerPart, ...] = ()  # the parts filled that adapters can add to

    def __call__(self, tensor: Weight) -> None:
        check_shape(tensor, self.shape)
        self.take(tensor)


def check_shape(tensor: Weight, expected: tuple[int, ...]) -> None:
    """Raises WeightsError for another shape; the caller adds the tensor's name."""
    if tuple(tensor.shape) != expected:
        raise WeightsError(f"its shape is {list(tensor.shape)} where the config asks for {list(expected)}")


def check_finite(tensor: Tensor) -> None:
    """Raises WeightsError for NaN or infinity, which a sum shows without a copy; the caller adds the tensor's name."""
    if not tensor.is_meta and not math.isfinite(tensor.sum(dtype=torch.float32)):
        raise WeightsError("it holds NaN or infinity: use an undamaged copy of the model")


class Vector:
    """A small parameter in full precision, such as a norm's weight or a bias; loaded from any float type.

    Kept as the checkpoint's numbers times `scale` plus `offset`.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0.0,
        scale: float = 1.0,
        offset: float = 0.0,
    ) -> None:
        self._scale, self._offset = scale, offset
        self.value = torch.full((size,), fill, dtype=dtype, device=device)  # [size]

    def loader(self, first: int = 0, size: int | None = None) -> Loader:
        """Takes one checkpoint tensor into entries first .. first + size - 1 (all by default)."""
        count = self.value.shape[0] if size is None else size

        def take(weight: Weight) -> None:
            tensor = floats(weight)
            check_finite(tensor)
            if (self._scale, self._offset) != (1.0, 0.0):
                tensor = tensor.float() * self._scale + self._offset
            self.value[first : first + count].copy_(tensor)

        return Loader((count,), take)

    def adopt(self, tensor: Tensor) -> None:
        """Takes over a tensor of the same shape without copying it."""
        check_shape(tensor, tuple(self.value.shape))
        self.value = tensor.to(device=self.value.device, dtype=self.value.dtype)


class Table:
    """Biases of any shape in full precision that stand on their own, such as those of experts."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=dtype, device=device)

    def loader(self, convert: Callable[[Tensor], Tensor] = torch.clone) -> Loader:
        def take(weight: Weight) -> None:
            tensor = floats(weight)
            check_finite(tensor)
            self.value.copy_(convert(tensor))

        return Loader(tuple(self.value.shape), take)

    def state(self) -> dict[str, Tensor]:
        return {"bias": self.value}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        check_shape(state["bias"], tuple(self.value.shape))
        self.value = state["bias"].to(device=self.value.device, dtype=self.value.dtype)


@runtime_checkable
class Stateful(Protocol):
    """A layer with parameters."""

    def state(self) -> dict[str, Tensor]: ...
    def adopt(self, state: Mapping[str, Tensor]) -> None: ...


def collect(layers: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Every layer's tensors as "layer name/tensor name"; views, not copies."""
    return {
        f"{name}/{key}": tensor for name, layer in layers.items() for key, tensor in layer.state().items()
    }


def distribute(layers: Mapping[str, Stateful], parameters: Mapping[str, Tensor]) -> None:
    """The inverse of `collect`: layers take the tensors over without copying. KeyError if one is missing."""
    states: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    for name, tensor in parameters.items():
        owner, _, key = name.rpartition("/")
        states[owner][key] = tensor
    for name, layer in layers.items():
        layer.adopt(states[name])


class Composite:
    """A part of a model that is made of layers: every attribute with parameters is one, under its own name."""

    def layers(self) -> dict[str, Stateful]:
        """Sublayers with parameters, by name; those of a part that is made of layers itself below the part's name."""
        found: dict[str, Stateful] = {}
        for name, layer in vars(self).items():
            if isinstance(layer, Stateful):  # a part may also keep a state of its own
                found[name] = layer
            elif isinstance(layer, Composite):
                found |= {f"{name}.{inner}": part for inner, part in layer.layers().items()}
        return found


class LayerStack(Composite):
    """A model: layers of its own, and equal blocks, whose layers are named `layers.<i>.<name>`."""

    blocks: Sequence[Composite]

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter as it is kept; views, not copies."""
        return collect(self._all_layers())

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """The inverse of `parameters`, without copying."""
        distribute(self._all_layers(), parameters)

    def _all_layers(self) -> dict[str, Stateful]:
        layers = self.layers()
        for i, block in enumerate(self.blocks):
            layers |= {f"layers.{i}.{name}": layer for name, layer in block.layers().items()}
        return layers
