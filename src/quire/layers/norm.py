"""Root mean square and layer normalisation, each also with the residual sum in front."""

from collections.abc import Mapping
from types import ModuleType

from torch import Tensor

from quire.layers.parameters import Loader, Vector


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight."""

    def __init__(self, kernel: ModuleType, weight: Vector, eps: float) -> None:
        self._kernel = kernel
        self._weight = weight
        self.eps = eps

    @property
    def weight(self) -> Tensor:
        return self._weight.value  # [width]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, width] -> [T, width]."""
        return self._kernel.rms_norm(x, self._weight.value, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place; the norm of the sum."""
        return self._kernel.add_rms_norm(x, residual, self._weight.value, self.eps)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += the norm of x, in place; returns residual."""
        return self._kernel.rms_norm_onto(x, residual, self._weight.value, self.eps)

    def heads(self, x: Tensor) -> None:
        """Normalises every head of x [T, heads, width] in place; x may be a strided view."""
        self._kernel.head_rms_norm(x, self._weight.value, self.eps)

    def loader(self) -> Loader:
        return self._weight.loader()

    def state(self) -> dict[str, Tensor]:
        return {"weight": self._weight.value}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        self._weight.adopt(state["weight"])


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias; `affine=False`: ones and zeros, not loaded."""

    def __init__(
        self, kernel: ModuleType, weight: Vector, bias: Vector, eps: float, affine: bool = True
    ) -> None:
        self._kernel = kernel
        self._weight = weight
        self._bias = bias
        self._affine = affine
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, width] -> [T, width]."""
        return self._kernel.layer_norm(x, self._weight.value, self._bias.value, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place; the norm of the sum."""
        return self._kernel.add_layer_norm(x, residual, self._weight.value, self._bias.value, self.eps)

    def loaders(self, name: str, bias: bool = True) -> dict[str, Loader]:
        """For the checkpoint tensors `name`.weight and, where it has a `bias`, `name`.bias."""
        if not self._affine:
            return {}
        loaders = {f"{name}.weight": self._weight.loader()}
        return loaders | {f"{name}.bias": self._bias.loader()} if bias else loaders

    def state(self) -> dict[str, Tensor]:
        return {"weight": self._weight.value, "bias": self._bias.value}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        self._weight.adopt(state["weight"])
        self._bias.adopt(state["bias"])
