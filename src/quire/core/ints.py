"""Ints: compact int32 arrays, in which ids and counts cross rooms."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Ints = array[int]
else:
    Ints = array  # array takes no subscript at run time before Python 3.12


def ints(values: Iterable[int] = ()) -> Ints:
    """numpy and torch read the result without copying."""
    return array("i", values)
