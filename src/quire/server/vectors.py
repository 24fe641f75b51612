"""Vectors as a reply holds them: cut, and as numbers or base64. Plain Python: this process needs no numpy otherwise."""

import base64
import math
import sys
from array import array


def written(vector: bytes, encoding: str, dimensions: int | None) -> list[float] | str:
    """`vector` is float32 in this machine's order; base64 is little-endian, as OpenAI's clients read it."""
    numbers = array("f", vector)
    if dimensions is not None and dimensions < len(numbers):
        numbers = _shortened(numbers, dimensions)
    if encoding == "float":
        return numbers.tolist()
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def _shortened(numbers: "array[float]", dimensions: int) -> "array[float]":
    """The first of them, scaled to length one again; zeros stay zeros."""
    kept = numbers[:dimensions]
    length = math.sqrt(sum(number * number for number in kept))
    return array("f", (number / length for number in kept)) if length else kept
