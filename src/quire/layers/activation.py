"""Activations of feed-forward layers, by the names that config.json uses."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

from torch import Tensor

from quire.core.errors import ModelError

_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
KNOWN = ("relu", "gelu", *_TANH)
GATES = ("silu", "gelu", *_TANH)


def activation(kernel: ModuleType, name: str) -> Callable[[Tensor], Tensor]:
    """x [T, width] -> [T, width]. An unknown name is refused."""
    if name == "relu":
        return kernel.relu
    if name == "gelu":
        return partial(kernel.gelu, approximate="none")
    if name in _TANH:
        return partial(kernel.gelu, approximate="tanh")
    raise ModelError(f"activation {name!r} in config.json is not known: choose one of {', '.join(KNOWN)}")


def gelu_gate(kernel: ModuleType, name: str) -> Callable[[Tensor], Tensor] | None:
    """x [T, 2F] (gate | up) -> gelu(gate) * up [T, F]; None for silu, which GEMMs fuse.

    An unknown name is refused.
    """
    if name not in GATES:
        raise ModelError(f"hidden_act={name!r} in config.json is not known: choose one of {', '.join(GATES)}")
    if name == "silu":
        return None
    return partial(kernel.gelu_mul, approximate="none" if name == "gelu" else "tanh")
