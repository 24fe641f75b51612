"""All parameters of a model under one flat set of names, to keep them in a file and to take them back."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


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
