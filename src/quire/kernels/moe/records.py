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


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), both clamped, in place of silu(gate) * up; with biases."""

    alpha: float
    limit: float  # of gate from above, of up on both sides
    gate_up_bias: Tensor  # [E, 2F]
    down_bias: Tensor  # [E, H]


@dataclass(frozen=True, slots=True)
class AwayExperts:
    """Experts beside those of the stacks that a kernel is given: in host memory that the device can read."""

    gate_up: Tensor  # [A, 2F, H]
    down: Tensor  # [A, H, F]
    places: Tensor  # [E] int32 on the device: an expert's place in the stacks, or -1 - its place here
