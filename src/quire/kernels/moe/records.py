"""Routing: which experts each token goes through."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router chose for T tokens. A token's experts are in order of falling probability, and its results are
    summed in this order.
    """

    experts: Tensor  # [T, k] int32, distinct in a row
    weights: Tensor  # [T, k] float32
    gates: Tensor | None  # [T] float32, the weight of the shared expert's result; None: there is none
