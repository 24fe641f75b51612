"""Frozen weights of the base model: multiplied with gradients to activations only.

A weight may be stored as something else than the matrix itself: in NF4 (QLoRA), or as this rank's share of it
(ZeRO-3). It is then restored for each product, in the backward pass once more, and never saved between them.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.quant.codebook import CodeBook
from quire.quant.encoded import Encoded, Scheme
from quire.quant.encoded_matrix import INT8
from quire.quant.format import Matrix, NumberFormat
from quire.quant.schemes import COLUMNS, Packed, pack
from quire.train import differentiable

NF4 = CodeBook("nf4")  # double quantization


class StoredWeight(ABC):
    """A weight in the form that is kept between uses."""

    @abstractmethod
    def restore(self) -> Tensor:
        """The whole matrix in the activation type."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of what is kept."""


class EncodedWeight(StoredWeight):
    """Rows in schemes of few bits: NF4, int8, or those of their checkpoint, such as GGUF's blocks.

    On a GPU they are packed for the kernel that decodes them, and a product runs on the decoded weight.
    """

    def __init__(self, rows: Mapping[int, Encoded], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._parts = [rows[first] for first in sorted(rows)]
        if self._parts[0].device.type == "cuda":
            self._parts = [pack(part, part.device, dtype) for part in self._parts]

    def restore(self) -> Tensor:
        parts = [self._decoded(part) for part in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decoded(self, part: Encoded) -> Tensor:
        if isinstance(part.scheme, Packed) and COLUMNS not in part.parts:
            product: Any = part.scheme.kernel.Product(part.scheme.inner.name, part.parts, part.shape)
            weight: Tensor = product.weight(self._dtype)
            return weight
        return part.decode().to(self._dtype)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)


Store = Callable[[Tensor], StoredWeight | None]  # None: the matrix stays as it is


def keep(weight: Tensor) -> StoredWeight | None:
    return None


def store_nf4(weight: Tensor) -> StoredWeight | None:
    """NF4 with double quantization: about 4.13 bits a weight, 4.25 as a GPU's kernel packs it."""
    return store_as(NF4, weight)


def store_int8(weight: Tensor) -> StoredWeight | None:
    """One scale per row, as serving keeps the token table and the head beside weights of 4 bits on a GPU."""
    return store_as(INT8, weight)


def store_as(scheme: Scheme, weight: Tensor) -> StoredWeight | None:
    if not scheme.fits(weight.shape[1]):
        return None
    return EncodedWeight({0: Encoded.of(scheme, weight)}, weight.dtype)


class _RestoredLinear(torch.autograd.Function):
    """x @ weight.T of a stored weight, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: StoredWeight) -> Tensor:
        ctx.weight = weight
        return x @ weight.restore().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.weight.restore(), None


class FrozenMatrix(Matrix):
    """`store` is called with the whole matrix as soon as its last row is loaded.

    `keeps_encoded`: rows that come encoded, all of them, stay as they are.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device,
        store: Store,
        keeps_encoded: bool = False,
    ) -> None:
        super().__init__(num_rows, num_columns, sys.modules[differentiable.__name__])
        self._dtype, self._device, self._store = dtype, device, store
        self._weight: Tensor | None = None  # [num_rows, num_columns]
        self._stored: StoredWeight | None = None  # in place of it
        self._num_loaded = 0
        self._keeps_encoded = keeps_encoded
        self.scheme = ""  # of rows that came encoded
        self._encoded: dict[int, Encoded] = {}  # by first row

    def load_encoded(self, first_row: int, rows: Encoded) -> None:
        self.scheme = rows.scheme.name
        if not self._keeps_encoded:
            super().load_encoded(first_row, rows)
            return
        self._encoded[first_row] = rows.to(self._device)
        self._num_loaded += rows.shape[0]
        if self._num_loaded == self.num_rows:
            self._seal()

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        if self._weight is None:
            shape = (self.num_rows, self.num_columns)
            self._weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._weight[first_row : first_row + rows.shape[0]].copy_(rows)
        self._num_loaded += rows.shape[0]
        if self._num_loaded == self.num_rows:
            self._seal()

    def _seal(self) -> None:
        if self._weight is None:
            self._stored = EncodedWeight(self._encoded, self._dtype)
            return
        for first, rows in self._encoded.items():  # some rows came as floats: all become floats
            self._weight[first : first + rows.shape[0]].copy_(rows.decode())
        self._stored = self._store(self._weight)
        if self._stored is not None:
            self._weight = None

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if self._stored is None:
            assert self._weight is not None, "a matrix must be loaded before it is used"
            y = F.linear(x, self._weight, bias)
        else:
            y = _RestoredLinear.apply(x, self._stored)
            y = y if bias is None else y + bias
        return y if residual is None else y + residual

    def state(self) -> dict[str, Tensor]:
        """A stored weight is restored."""
        weight = self._weight if self._stored is None else self._stored.restore()
        assert weight is not None, "a matrix must be loaded before it is used"
        return {"weight": weight}

    @property
    def kept_bytes(self) -> int:
        if self._stored is not None:
            return self._stored.num_bytes
        return 0 if self._weight is None else self._weight.numel() * self._weight.element_size()

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """A tied head takes the embedding's table, in one memory: none of its bytes are its own."""
        self._weight = state["weight"]

    def share(self, stored: StoredWeight) -> None:
        """As `adopt`, of a table that is stored."""
        self._stored = stored


class FrozenFormat(NumberFormat):
    """Full precision. Matrices of layers are kept as `store` gives them, tables and the head by `store_table`."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        store: Store = keep,
        store_table: Store = keep,
        keeps_encoded: bool = False,
    ) -> None:
        super().__init__(dtype, device)
        self.name = "frozen"
        self.store_table = store_table
        self._store, self._keeps_encoded = store, keeps_encoded
        self.matrices: list[FrozenMatrix] = []

    def matrix(self, num_rows: int, num_columns: int) -> FrozenMatrix:
        return self._made(num_rows, num_columns, self._store, self._keeps_encoded)

    def head(self, num_rows: int, num_columns: int) -> FrozenMatrix:
        return self._made(num_rows, num_columns, self.store_table, keeps_encoded=False)

    def _made(self, num_rows: int, num_columns: int, store: Store, keeps_encoded: bool) -> FrozenMatrix:
        made = FrozenMatrix(num_rows, num_columns, self.activation_dtype, self._device, store, keeps_encoded)
        self.matrices.append(made)
        return made
