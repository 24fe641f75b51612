"""Weight-only formats: a matrix that keeps encoded rows and multiplies by them in the activations' type."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels import choose, native
from quire.quant.encoded import Encoded, Plain, Scheme, join
from quire.quant.format import Matrix, NumberFormat
from quire.quant.full import FullMatrix
from quire.quant.scaled import Scaled
from quire.quant.schemes import Packed, from_parameters, pack, parameter_names, serves_cpu, serving


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one scheme. Parts of a fused projection may differ: Q4_K_M keeps values finer than queries."""

    first_row: int
    encoded: Encoded
    product: Any  # by the rows as a kernel packs them; None: tiles of rows are decoded and multiplied

    @property
    def last_row(self) -> int:
        return self.first_row + self.encoded.shape[0]


class EncodedMatrix(Matrix):
    """Holds segments of encoded rows, packed for the device's kernel. Without a kernel for a scheme, tiles of rows are
    decoded one after the other, so that a product needs a bounded amount of memory beside the stored bytes.
    """

    def __init__(
        self, num_rows: int, num_columns: int, number_format: "EncodedFormat", scheme: Scheme | None = None
    ) -> None:
        """`scheme`: of rows that come as floats; without one they stay in the activations' type."""
        super().__init__(num_rows, num_columns, choose("activation", number_format.device))
        self._format = number_format
        self._scheme = scheme or Plain(number_format.activation_dtype)
        self._gemm = number_format.gemm.gemm
        self._segments: list[Segment] = []

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        scheme = self._scheme
        if (
            isinstance(scheme, Plain)
            and self._format.native
            and rows.dtype in (torch.float16, torch.bfloat16)
        ):
            scheme = Plain(rows.dtype)  # native products widen as they read
        if rows.device.type == "meta":
            self._keep(first_row, Encoded.empty(scheme, (rows.shape[0], rows.shape[1])))
        else:
            self._keep(first_row, Encoded.of(scheme, rows.to(self._format.device)))

    def load_encoded(self, first_row: int, rows: Encoded) -> None:
        if self._format.keeps(rows.scheme):
            self._keep(first_row, rows.to(self._format.device))
        else:
            self.load_rows(first_row, rows.decode())

    def _keep(self, first_row: int, encoded: Encoded) -> None:
        kept = [s for s in self._segments if s.first_row != first_row]
        kept.append(self._segment(first_row, encoded))
        self._segments = sorted(kept, key=lambda segment: segment.first_row)
        if sum(segment.encoded.shape[0] for segment in kept) == self.num_rows:
            self._join()

    def _segment(self, first_row: int, encoded: Encoded) -> Segment:
        scheme = encoded.scheme
        product = None
        if isinstance(scheme, Packed) and encoded.device.type != "meta":
            product = scheme.kernel.Product(scheme.inner.name, encoded.parts, encoded.shape)
        return Segment(first_row, encoded, product)

    def _join(self) -> None:
        """Neighbours of one scheme become one segment: a product is one call where that is possible.

        Packed rows are joined again: absmaxes of two levels, for one, are common to rows only as they are stored.
        """
        joined = [self._format.packed(rows) for rows in _joined(self.encoded)]
        first_row = 0
        self._segments = []
        for rows in _joined(joined):
            self._segments.append(self._segment(first_row, rows))
            first_row += rows.shape[0]

    @property
    def encoded(self) -> tuple[Encoded, ...]:
        """The segments' rows, from the first row on."""
        return tuple(segment.encoded for segment in self._segments)

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._product(x, x.dtype, bias, residual)

    def logits(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def linear_silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = self._segments[0].product
        if len(self._segments) == 1 and product is not None:
            fused: Tensor | None = product.linear_silu_mul(self._ordered(x, self._segments[0]), bias)
            if fused is not None:
                return fused
        return super().linear_silu_mul(x, bias)

    @property
    def fuses_norm(self) -> bool:  # type: ignore[override]
        return hasattr(self._segments[0].product, "normed") and len(self._segments) == 1

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float, silu_mul: bool) -> Tensor | None:
        if self._segments[0].encoded.column_order is not None:
            return None
        fused: Tensor | None = self._segments[0].product.normed(x, norm_weight, eps, silu_mul)
        return fused

    def _product(
        self, x: Tensor, dtype: torch.dtype, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        assert self._segments, "a matrix must be loaded before it is used"
        on_cpu = x.device.type == "cpu"  # where a tape may record the product
        if on_cpu:
            y = native.empty(x.shape[0], self.num_rows, dtype=dtype)
        elif residual is not None and all(segment.product is not None for segment in self._segments):
            y = residual  # each number is read before it is overwritten
        else:
            y = torch.empty(x.shape[0], self.num_rows, dtype=dtype, device=x.device)
        for segment in self._segments:
            rows = slice(segment.first_row, segment.last_row)
            out, added = y[:, rows], None if residual is None else residual[:, rows]
            part = None if bias is None else bias[rows]
            if segment.product is not None:
                segment.product.linear(self._ordered(x, segment), out, part, added)
                continue
            self._decoded_product(x, segment.encoded, out)
            for term in (part, added):
                if term is not None:
                    out += term
        return y

    @staticmethod
    def _ordered(x: Tensor, segment: Segment) -> Tensor:
        """x by columns as the product takes them."""
        order, scheme = segment.encoded.column_order, segment.encoded.scheme
        return x if order is None or (isinstance(scheme, Packed) and scheme.orders) else x[:, order]

    def _decoded_product(self, x: Tensor, encoded: Encoded, out: Tensor) -> None:
        if isinstance(encoded.scheme, Plain):
            out.copy_(self._gemm(x, encoded.parts["weight"].to(x.dtype), widened=out.dtype is not x.dtype))
            return
        order = encoded.column_order
        x = x if order is None else x[:, order]
        widened = out.dtype is not x.dtype
        for first, rows in encoded.tiles():
            part = out[:, first : first + rows.shape[0]]
            part.copy_(self._gemm(x, rows.to(x.dtype), widened=widened))

    def state(self) -> dict[str, Tensor]:
        assert self._segments, "a matrix must be loaded before it is kept"
        return parameter_names({segment.first_row: segment.encoded for segment in self._segments})

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        segments = from_parameters(state, (self.num_rows, self.num_columns))
        self._segments = [
            self._segment(first_row, self._format.packed(encoded.to(self._format.device)))
            for first_row, encoded in segments.items()
        ]


def _joined(pieces: Sequence[Encoded]) -> list[Encoded]:
    """With neighbours that can follow each other as one."""
    runs: list[list[Encoded]] = []
    for piece in pieces:
        if runs and piece.can_follow(runs[-1][-1]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [join(run) for run in runs]


class EncodedFormat(NumberFormat):
    """Weight-only quantization: activations, embeddings, norms and the output head stay in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, exact: bool = False) -> None:
        """`exact`: activations are never rounded, as the kernel of a CPU does; rows are decoded and multiplied."""
        super().__init__(dtype, device)
        self.device = device
        self.exact = exact
        self.native = not exact and device.type == "cpu" and serves_cpu()

    def on(self, device: torch.device) -> "EncodedFormat":
        """The same format with its tensors on another device, packed for its own."""
        other = copy.copy(self)
        other.device = device
        return other

    def packed(self, encoded: Encoded) -> Encoded:
        """The rows as the device's kernel reads them. A format with rows that have no kernel is no longer native."""
        packed = encoded if self.exact else pack(encoded, self._device, self.activation_dtype)
        self.native = self.native and isinstance(packed.scheme, Packed)
        return packed

    def scheme(self, num_columns: int) -> Scheme | None:
        """For rows that come as floats; None: they stay precise."""
        return None

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        return EncodedMatrix(num_rows, num_columns, self, self.scheme(num_columns))

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        if self.native:
            return EncodedMatrix(num_rows, num_columns, self)
        return FullMatrix(num_rows, num_columns, self.activation_dtype, self.device, self.gemm)


class Checkpoint(EncodedFormat):
    """What the checkpoint has, in its own bytes: rows that come as floats stay floats."""

    name = "checkpoint"

    def keeps(self, scheme: Scheme) -> bool:
        return True

    def table(self, encoded: Encoded) -> Encoded | None:
        packed = self.packed(encoded.to(self.device))
        return packed if packed.gathers else encoded.to(self.device) if encoded.gathers else None

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        return self.matrix(num_rows, num_columns)


INT8 = Scaled("int8")


class LowBit(EncodedFormat):
    """Quantizes at load. `schemes`: what is tried for rows of floats, the first that fits their length."""

    worth_keeping = True

    def __init__(
        self,
        name: str,
        schemes: tuple[Scheme, ...],
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
    ) -> None:
        super().__init__(dtype, device, exact)
        self.name = (
            f"{name}-{'-'.join(scheme.name for scheme in schemes)}-{str(dtype).removeprefix('torch.')}"
            f"{'-exact' if exact else ''}"
        )
        self._schemes = schemes
        self._kinds = tuple({type(scheme) for scheme in schemes})

    def keeps(self, scheme: Scheme) -> bool:
        return isinstance(scheme, self._kinds)

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        """int8 per channel on a GPU: a head is large, and eight bits change logits little."""
        if self.table_scheme(num_columns) is not None:
            return EncodedMatrix(num_rows, num_columns, self, INT8)
        return super().head(num_rows, num_columns)

    def table_scheme(self, num_columns: int) -> Scheme | None:
        """The head's, which may be tied to the table."""
        if self._device.type == "cpu":
            return None
        kernel = serving(INT8.name, (1, num_columns), self._device, self.activation_dtype)
        return INT8 if kernel is not None else None

    def scheme(self, num_columns: int) -> Scheme | None:
        return next((scheme for scheme in self._schemes if scheme.fits(num_columns)), None)
