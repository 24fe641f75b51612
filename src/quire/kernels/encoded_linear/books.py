"""Code books of 4-bit weights, and of the 8-bit absmaxes of double quantization."""

from functools import cache

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BNB = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # twelfths
CODES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * value / 6 for sign in (1, -1) for value in _E2M1),
    "fp4bnb": tuple(sign * value / 12 for sign in (1, -1) for value in _BNB),
}  # fmt: skip


@cache
def dynamic_map() -> tuple[float, ...]:
    """bitsandbytes' 8-bit code book: signed, seven decades, the finest steps where values are small."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / 2
        decade = 10 ** (exponent - 6)
        values += (decade * means).tolist() + (-decade * means).tolist()
    return tuple(sorted(values))
