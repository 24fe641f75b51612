"""Encoded rows: a weight in the bytes of its own scheme, with the reference that decodes it.

A `Source` may yield an `Encoded` in place of a float tensor. A matrix whose format keeps the scheme keeps the bytes;
every other one decodes them and converts the floats. Rows are independent of each other, so that fused
projections are filled part by part and cut by rows; cuts by columns are possible where a group begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quire.core.errors import WeightsError

TILE_WEIGHTS = 1 << 22  # decoded at a time: bounds the float32 copy of a large matrix
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Part:
    """Shape of one stored tensor, and which rows and columns of the weight one entry of it belongs to."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # that it may have; the first is what `encode` makes
    rows: int = 1  # of the weight, per entry of dimension 0; 0: the part belongs to all rows
    columns: int = 0  # of the weight, per entry of dimension 1; 0: the part is not divided by columns


class Scheme(ABC):
    """How a weight [num_rows, num_columns] is stored. Immutable; schemes with one name are equal."""

    packing = 1  # weights per entry of the first stored tensor [num_rows, entries, …]

    @property
    @abstractmethod
    def name(self) -> str:
        """Says the whole scheme: `named` finds it again. Without / and :, which separate names of tensors."""

    @abstractmethod
    def layout(self, num_rows: int, num_columns: int) -> dict[str, Part]:
        """The stored tensors. WeightsError if the scheme cannot hold this shape."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """The reference: float32 [num_rows, num_columns], by columns as they are stored."""

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """The reference: float rows [n, num_columns] to the stored tensors."""
        raise NotImplementedError(f"{self.name} can be read, not made")

    def fits(self, num_columns: int) -> bool:
        """Whether rows of this length can be stored."""
        try:
            self.layout(1, num_columns)
        except WeightsError:
            return False
        return True

    def gathers(self, shape: tuple[int, int]) -> bool:
        """Whether single rows can be taken out."""
        return all(part.rows == 1 for part in self.layout(*shape).values())

    def gather(self, parts: Mapping[str, Tensor], shape: tuple[int, int], ids: Tensor) -> Tensor:
        """float32 [T, num_columns]: the rows of these ids. Only if `gathers`."""
        return self.decode({name: part[ids] for name, part in parts.items()}, (ids.shape[0], shape[1]))

    def cut_rows(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], first: int, last: int
    ) -> dict[str, Tensor]:
        """The stored tensors of rows first .. last - 1; views where possible."""
        cut = {}
        for name, part in self.layout(*shape).items():
            if part.rows > 1 and (first % part.rows or (last % part.rows and last != shape[0])):
                raise WeightsError(
                    f"rows {first} to {last} of a weight in {self.name} do not begin and end at a multiple of "
                    f"{part.rows}: choose another cut"
                )
            tensor = parts[name]
            cut[name] = tensor[first // part.rows : -(-last // part.rows)] if part.rows else tensor
        return cut

    def cut_columns(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], first: int, last: int
    ) -> "tuple[Scheme, dict[str, Tensor]]":
        """The stored tensors of columns first .. last - 1 and their scheme."""
        cut = {}
        for name, part in self.layout(*shape).items():
            if part.columns and (first % part.columns or last % part.columns):
                raise WeightsError(
                    f"columns {first} to {last} of a weight in {self.name} do not begin and end at a multiple of "
                    f"{part.columns}: choose another cut"
                )
            tensor = parts[name]
            cut[name] = tensor[:, first // part.columns : last // part.columns] if part.columns else tensor
        return self, cut

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scheme) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Rows of a weight in a scheme. WeightsError if the parts are not what the scheme asks for."""

    scheme: Scheme
    parts: Mapping[str, Tensor]
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        layout = self.scheme.layout(*self.shape)
        if self.parts.keys() != layout.keys():
            raise WeightsError(
                f"{self.scheme.name} is stored as {', '.join(layout)}, not as {', '.join(self.parts)}"
            )
        for name, part in layout.items():
            tensor = self.parts[name]
            if tuple(tensor.shape) != part.shape or tensor.dtype not in part.dtypes:
                raise WeightsError(
                    f"its {name} is {_dtype(tensor.dtype)} {list(tensor.shape)} where {self.scheme.name} of "
                    f"{list(self.shape)} has {' or '.join(map(_dtype, part.dtypes))} {list(part.shape)}"
                )

    @classmethod
    def of(cls, scheme: Scheme, rows: Tensor) -> "Encoded":
        """Encodes float rows; WeightsError if a scale is not finite."""
        encoded = cls(scheme, scheme.encode(rows), (rows.shape[0], rows.shape[1]))
        scales = [part for part in encoded.parts.values() if part.dtype in SCALE_DTYPES]
        if not isinstance(scheme, Plain) and not all(bool(part.isfinite().all()) for part in scales):
            row = int(rows.abs().amax(1).argmax())  # of NaN, if there is one: no number is larger
            raise WeightsError(
                f"row {row} holds NaN, infinity or a value too large for scales of {scheme.name}: use an undamaged "
                "copy of the model, or quantization none"
            )
        return encoded

    @classmethod
    def empty(cls, scheme: Scheme, shape: tuple[int, int], device: str | torch.device = "meta") -> "Encoded":
        """Shapes without content."""
        parts = {
            name: torch.empty(part.shape, dtype=part.dtypes[0], device=device)
            for name, part in scheme.layout(*shape).items()
        }
        return cls(scheme, parts, shape)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parts.values())

    @property
    def bits(self) -> float:
        """Stored bits per weight, everything counted."""
        return 8 * self.num_bytes / (self.shape[0] * self.shape[1])

    def decode(self) -> Tensor:
        """float32 [num_rows, num_columns]."""
        if next(iter(self.parts.values())).device.type == "meta":
            return torch.empty(self.shape, device="meta")
        order = self.column_order
        decoded = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        for first, rows in self.tiles():
            tile = decoded[first : first + rows.shape[0]]
            if order is None:
                tile.copy_(rows)
            else:
                tile[:, order] = rows
        return decoded

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    @property
    def column_order(self) -> Tensor | None:
        """Where stored columns are in another order, int32 [num_columns]: the column of x that each belongs to."""
        return self.parts.get("columns")

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, float32 rows) with the columns as they are stored, a bounded number at a time."""
        step = max(1, TILE_WEIGHTS // self.shape[1])
        coarse = max([part.rows for part in self.scheme.layout(*self.shape).values()])
        step = -(-step // coarse) * coarse
        for first in range(0, self.shape[0], step):
            tile = self.rows(first, min(first + step, self.shape[0]))
            yield first, tile.scheme.decode(tile.parts, tile.shape)

    def rows(self, first: int, last: int) -> "Encoded":
        """Rows first .. last - 1."""
        if (first, last) == (0, self.shape[0]):
            return self
        parts = self.scheme.cut_rows(self.parts, self.shape, first, last)
        return Encoded(self.scheme, parts, (last - first, self.shape[1]))

    def columns(self, first: int, last: int) -> "Encoded":
        """Columns first .. last - 1."""
        scheme, parts = self.scheme.cut_columns(self.parts, self.shape, first, last)
        return Encoded(scheme, parts, (self.shape[0], last - first))

    @property
    def gathers(self) -> bool:
        """Whether single rows can be taken out."""
        return self.scheme.gathers(self.shape)

    def gather(self, ids: Tensor) -> Tensor:
        """float32 [T, num_columns]: the rows of these ids."""
        return self.scheme.gather(self.parts, self.shape, ids)

    def to(self, device: torch.device) -> "Encoded":
        return Encoded(self.scheme, {name: part.to(device) for name, part in self.parts.items()}, self.shape)

    def can_follow(self, other: "Encoded") -> bool:
        """Whether `join` can put these rows behind the other's: one scheme, one set of types, equal common parts."""
        if self.scheme != other.scheme or self.shape[1] != other.shape[1]:
            return False
        if any(tensor.dtype != other.parts[name].dtype for name, tensor in self.parts.items()):
            return False
        layout = self.scheme.layout(*other.shape)
        if any(other.shape[0] % part.rows for part in layout.values() if part.rows):
            return False
        common = [name for name, part in layout.items() if not part.rows]
        if self.device.type == "meta":
            return not common
        return all(torch.equal(self.parts[name], other.parts[name]) for name in common)


def join(pieces: Sequence[Encoded]) -> Encoded:
    """Pieces of rows, each of which `can_follow` the one before, as one record."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    layout = first.scheme.layout(*first.shape)
    parts = {
        name: torch.cat([piece.parts[name] for piece in pieces]) if part.rows else first.parts[name]
        for name, part in layout.items()
    }
    return Encoded(first.scheme, parts, (sum(piece.shape[0] for piece in pieces), first.shape[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns first .. last - 1 of a weight, with the whole of it: some formats scale whole rows."""

    whole: Tensor | Encoded
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.whole.shape[0], self.last - self.first

    def cut(self) -> Tensor | Encoded:
        if isinstance(self.whole, Encoded):
            return self.whole.columns(self.first, self.last)
        return self.whole[:, self.first : self.last]


Weight: TypeAlias = Tensor | Encoded | Columns


def floats(weight: Weight) -> Tensor:
    """The weight as a float tensor."""
    if isinstance(weight, Columns):
        return floats(weight.whole)[:, weight.first : weight.last]
    return weight.decode() if isinstance(weight, Encoded) else weight


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Plain(Scheme):
    """Floats as they are: rows that a quantized checkpoint keeps precise."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property
    def name(self) -> str:
        return _dtype(self.dtype)

    def layout(self, num_rows: int, num_columns: int) -> dict[str, Part]:
        return {"weight": Part((num_rows, num_columns), (self.dtype,), columns=1)}

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"weight": rows.to(self.dtype, copy=True)}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        return parts["weight"].float()


def divided(num_columns: int, group: int, scheme: str) -> int:
    """Groups of a row; WeightsError if they do not divide it."""
    if group < 1 or num_columns % group:
        raise WeightsError(
            f"rows of {num_columns} columns do not divide into groups of {group} ({scheme}): choose a group size that "
            "divides, or full precision"
        )
    return num_columns // group
