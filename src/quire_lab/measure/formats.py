"""Number formats that are compared, by the names that reports use, and how far their weights are from the floats."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.layers.linear import Linear
from quire.models.model import DecoderModel
from quire.quant.choice import choose_format
from quire.quant.encoded import Encoded, Scheme
from quire.quant.encoded_matrix import LowBit
from quire.quant.format import NumberFormat
from quire.quant.int4 import GROUPS, Int4
from quire.quant.schemes import named
from quire_lab.baselines.vector_wise import VectorWise

CPU = torch.device("cpu")
VECTOR_WISE = "int8 vector-wise"
SYMMETRIC = "int4-g64, −7 to 7"  # the usual definition: as many steps on either side of zero
# name: what it is, for a note
FORMATS = {
    "none": "float32, a quantized checkpoint decoded",
    "checkpoint": "the checkpoint's own bytes",
    "int8": "one scale per output channel and per token, columns mixed by a Hadamard matrix",
    VECTOR_WISE: "int8 as in the LLM.int8 paper, without decomposition",
    "llm-int8": "LLM.int8: outliers in 16 bits",
    **{f"int4-g{group}": f"int4, groups of {group}, symmetric" for group in GROUPS},
    **{f"int4-g{group}z": f"int4, groups of {group}, with zero points" for group in GROUPS},
    "nf4-b64": "NF4, blocks of 64",
    "nf4-b64n": "NF4, blocks of 64, double quantization",
    "fp4-b64": "FP4 (E2M1), blocks of 64",
    "fp4-b64n": "FP4 (E2M1), blocks of 64, double quantization",
}
FOUR_BITS = ("nf4-b64", "nf4-b64n", "fp4-b64", SYMMETRIC, "int4-g64", "int4-g64z")  # of one block size


def check_formats(names: Iterable[str]) -> None:
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"--formats {name}: is not known, choose from {', '.join(FORMATS)}")


def format_named(name: str) -> NumberFormat:
    """On the CPU."""
    if name == VECTOR_WISE:
        return VectorWise()
    if name in ("none", "checkpoint", "int8", "llm-int8"):
        return choose_format(CPU, quantization=name)
    scheme = named(name)
    schemes: tuple[Scheme, ...] = (scheme,)
    if isinstance(scheme, Int4):  # smaller groups where these do not divide a row, as the engine does it
        schemes += tuple(Int4(group, scheme.zeros) for group in GROUPS if group < scheme.group)
    return LowBit(name.partition("-")[0], schemes, torch.float32, CPU)


def decoded_matrices(model: DecoderModel) -> Iterator[Tensor]:
    """float32 [num_rows, num_columns] of every linear layer: a product with one-hot rows is exact in every format."""
    seen: set[int] = set()
    for part in (part for loader in model.loaders().values() for part in loader.parts):
        linear = part.layer
        if isinstance(linear, Linear) and id(linear) not in seen:
            seen.add(id(linear))
            with (
                torch.inference_mode()
            ):  # left before the yield: the mode is the thread's, not the generator's
                weight = (linear(torch.eye(part.num_inputs)) - linear(torch.zeros(1, part.num_inputs))).T
            yield weight


def relative_error(exact: Iterable[Tensor], found: Iterable[Tensor]) -> float:
    """‖found − exact‖ / ‖exact‖ over all matrices together."""
    wrong, size = 0.0, 0.0
    for a, b in zip(exact, found, strict=True):
        wrong += float((b - a).square().sum(dtype=torch.float64))
        size += float(a.square().sum(dtype=torch.float64))
    return math.sqrt(wrong / size)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Weights in one scheme."""

    error: float  # relative
    bits: float  # per weight, by the stored bytes


def rounded(name: str, weights: Sequence[Tensor]) -> Rounded:
    """One of FOUR_BITS; matrices whose rows it does not divide must not be among the weights."""
    scheme = named("int4-g64" if name == SYMMETRIC else name)
    encoded = [
        Encoded(scheme, scheme.encode(weight, steps=7), (weight.shape[0], weight.shape[1]))
        if name == SYMMETRIC and isinstance(scheme, Int4)
        else Encoded.of(scheme, weight)
        for weight in weights
    ]
    num_bytes, num_weights = (
        sum(rows.num_bytes for rows in encoded),
        sum(weight.numel() for weight in weights),
    )
    return Rounded(relative_error(weights, (rows.decode() for rows in encoded)), 8 * num_bytes / num_weights)
