"""QuantizedReader: the weights of a quantized checkpoint, found by the names and shapes of its tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelError, WeightsError
from quire.quant.encoded import Encoded, Scheme

Get = Callable[[str], Tensor]  # a tensor of the checkpoint, by name
# what values of another type or shape than a format's raise where they are used
DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
LARGEST = 65504.0  # float16's: kernels keep some scales in it, and no sound weight has a larger one


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors header says about a tensor."""

    dtype: str
    shape: tuple[int, ...]


class QuantizedReader(ABC):
    """The quantized weights of one checkpoint. ModelError if config and tensors contradict each other."""

    method: str  # config.json's quant_method
    marks: tuple[str, ...]  # suffixes of tensors that only quantized modules have

    def __init__(self, config: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
        self.config = config
        self.headers = headers
        self.modules = sorted(
            {name.removesuffix(mark) for mark in self.marks for name in headers if name.endswith(mark)}
        )
        if not self.modules:
            wanted = " or ".join(f"*{mark}" for mark in self.marks)
            shown = next(
                (what for mark, what in MARKS.items() if any(n.endswith(mark) for n in headers)), "plain"
            )
            raise ModelError(
                f"config.json names quant_method {self.method!r}, but no tensor is named {wanted}; they are {shown} "
                "weights: take the config.json that belongs to them"
            )

    @abstractmethod
    def describe(self, module: str, get: Get) -> tuple[Scheme, tuple[int, int]]:
        """The scheme and shape of a module's weight, by headers and tensors of a few bytes."""

    @abstractmethod
    def parts(self, module: str, scheme: Scheme, shape: tuple[int, int], get: Get) -> dict[str, Tensor]:
        """The stored tensors in the scheme's layout, their content checked."""

    def owned(self) -> frozenset[str]:
        """Names of the tensors that encoded weights are made of."""
        modules = set(self.modules)
        return frozenset(
            name
            for name in self.headers
            if not name.endswith(".bias")
            and any(name[:at] in modules for at, letter in enumerate(name) if letter == ".")
        )

    def read(self, module: str, get: Get) -> Encoded:
        with naming_damage(module):
            scheme, shape = self.describe(module, get)
            return Encoded(scheme, self.parts(module, scheme, shape, get), shape)

    def empty(self, module: str, get: Get) -> Encoded:
        """Shapes without content."""
        with naming_damage(module):
            return Encoded.empty(*self.describe(module, get))

    def header(self, name: str) -> Header:
        if name not in self.headers:
            raise ModelError(
                f"tensor {name} is missing, which {self.method} weights have: fetch the checkpoint again"
            )
        return self.headers[name]

    def check_group(self, module: str, asked: Any, found: int, num_columns: int) -> None:
        """Whether the tensors' group size is the one that config.json names (-1 and None: whole rows)."""
        expected = num_columns if asked in (None, -1) else asked
        if expected != found:
            raise ModelError(
                f"{module}: its scales are for groups of {found} columns, and config.json's quantization_config has "
                f"group_size={asked}: take the config.json that belongs to these weights"
            )


# Tensors that only quantized modules have, and what wrote them.
MARKS = {
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors",
    ".qweight": "AWQ or GPTQ",
    ".weight.quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
}


@contextmanager
def naming_damage(what: str) -> Iterator[None]:
    """Turns what damaged content raises into one WeightsError that names it."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{what}: {error}: quantize the model again, or fetch it again") from error
    except DAMAGE as error:
        raise WeightsError(f"{what}: damaged ({error!r}): fetch the checkpoint again") from error


def finite(name: str, scales: Tensor, allow_zero: bool = False) -> Tensor:
    """The scales as they are; WeightsError names one that is not a number, zero or too large for float16."""
    wide = scales.float()
    wrong = ~(wide.abs() <= LARGEST) | (False if allow_zero else wide == 0)
    if wrong.any():
        at = [int(i) for i in wrong.nonzero()[0]]
        raise WeightsError(f"tensor {name} has a scale of {float(wide[tuple(at)])} at {at}")
    return scales


def nibbles(packed: Tensor, dim: int) -> Tensor:
    """int32 words -> uint8 values of 4 bits along `dim`, the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    spread = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - dim - 1))) & 15
    return spread.flatten(dim, dim + 1).to(torch.uint8)


def column_order(name: str, group_of: Tensor, group: int) -> Tensor | None:
    """The columns ordered by their group; None if they are in order already. WeightsError if a group has no `group`."""
    num_columns = group_of.numel()
    in_order = torch.arange(num_columns) // group
    if torch.equal(group_of.long(), in_order):
        return None
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order].long(), in_order):
        raise WeightsError(f"tensor {name} does not give every group {group} of {num_columns} columns")
    return order.int()
