"""Every scheme of stored weights, by name, and the names of encoded rows among a model's parameters."""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from quire.quant.codebook import CodeBook
from quire.quant.encoded import Encoded, Plain, Scheme
from quire.quant.gguf_blocks import GgufBlocks
from quire.quant.int4 import Int4
from quire.quant.packed import Packed
from quire.quant.scaled import Scaled

MAIN = ("packed", "blocks", "weight")  # the part with the weights themselves
FLOATS = ("float32", "float16", "bfloat16")


def named(name: str) -> Scheme:
    """The inverse of `Scheme.name`; KeyError if there is none."""
    if name in FLOATS:
        return Plain(getattr(torch, name))
    stored, _, layout = name.partition("@")
    if layout:
        packed = Packed.parse(layout, named(stored))
        if packed is None:
            raise KeyError(name)
        return packed
    for kind in (Int4, CodeBook, GgufBlocks, Scaled):
        scheme = kind.parse(name)
        if scheme is not None:
            return scheme
    raise KeyError(name)


def parameter_names(segments: Mapping[int, Encoded]) -> dict[str, Tensor]:
    """Stored tensors of rows that begin at these rows, under names that `from_parameters` reads.

    Rows in one float type are `weight`, as a full matrix has it; others tell their first row and scheme.
    """
    if len(segments) == 1 and isinstance(segments[0].scheme, Plain):
        return dict(segments[0].parts)
    return {
        f"{first_row}:{encoded.scheme.name}:{name}": part
        for first_row, encoded in segments.items()
        for name, part in encoded.parts.items()
    }


def from_parameters(state: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[int, Encoded]:
    """The inverse of `parameter_names`; other names are passed over. KeyError or WeightsError if rows are missing."""
    pieces: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if key == "weight":
            pieces.setdefault((0, Plain(tensor.dtype).name), {})[key] = tensor
        elif key.count(":") == 2:
            first_row, scheme, part = key.split(":")
            pieces.setdefault((int(first_row), scheme), {})[part] = tensor
    starts = [*sorted(first for first, _ in pieces), shape[0]]
    if starts[0] != 0:
        raise KeyError("rows from 0 on")
    ends = dict(pairwise(starts))
    return {
        first: Encoded(named(name), parts, (ends[first] - first, shape[1]))
        for (first, name), parts in sorted(pieces.items())
    }
