"""Counter-based random numbers: a function of (seed, sample index, position, purpose) alone.

Nothing is stored between steps, so batching, preemption, chunking and speculation cannot move a request's
random numbers. The function, all on unsigned 64-bit integers that wrap:

    mix(x): x ^= x >> 30;  x *= BF58476D1CE4E5B9h;  x ^= x >> 27;  x *= 94D049BB133111EBh;  x ^= x >> 31
    key     = mix(mix(mix(seed + G) + G * (sample index + 1)) + G * (purpose + 1))
    bits    = mix(key + G * (position + 1))          with G = 9E3779B97F4A7C15h
    uniform = (bits >> 11) / 2^53

`mix` is splitmix64's finaliser and the last line is splitmix64 itself, seeded with `key` and jumped to
`position`: one stream per (seed, sample index, purpose). Integers only until the last, exact division, so
each platform gets the same value. `kernels/sample` computes the same on devices.
"""

from enum import IntEnum

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_UNIT = 2.0**-53


class Purpose(IntEnum):
    """What a random number decides. Numbers are part of the function: append, never renumber."""

    TOKEN = 0  # which token the target distribution yields
    DRAFT = 1  # which token a draft proposes
    ACCEPT = 2  # whether a proposed token is accepted
    RESAMPLE = 3  # which token replaces a rejected one


def stream_key(seed: int, sample_index: int, purpose: Purpose) -> int:
    """The key of one stream, computed once per row. A negative seed counts as its two's complement."""
    state = _mix_integer((seed + _GOLDEN) & _ALL_BITS)
    state = _mix_integer((state + _GOLDEN * (sample_index + 1)) & _ALL_BITS)
    return _mix_integer((state + _GOLDEN * (int(purpose) + 1)) & _ALL_BITS)


def uniforms(
    keys: np.ndarray,  # [S] uint64
    positions: np.ndarray,  # [S] int64, not negative
) -> np.ndarray:  # [S] float64 in [0, 1)
    """The number at `positions` of each stream."""
    counters = positions.astype(np.uint64) + np.uint64(1)
    bits = keys + np.uint64(_GOLDEN) * counters
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    bits = bits ^ (bits >> np.uint64(31))
    return (bits >> np.uint64(11)).astype(np.float64) * _UNIT


def _mix_integer(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _ALL_BITS
    value = ((value ^ (value >> 27)) * _SECOND) & _ALL_BITS
    return value ^ (value >> 31)
