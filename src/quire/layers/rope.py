"""Rotary position embedding: the table of cosines and sines, for every known way of stretching it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelError
from quire.weights.hyperparameters import MAX_SIZE, number, positive

DEFAULT_THETA = 10000.0
_NUMBERS = (
    *("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
)

Parameters = Mapping[str, Any]


def rope_parameters(hf: Parameters) -> dict[str, Any]:
    """The rope settings of a config.json, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    The result always has `rope_type` and `rope_theta`. An unknown rope type is refused.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json has rope settings {given!r}, which must be an object: correct them")
    parameters = dict(given)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type == "su":  # longrope's first name
        rope_type = "longrope"
    if not isinstance(rope_type, str) or rope_type not in _FREQUENCIES:
        known = ", ".join(sorted(_FREQUENCIES))
        raise ModelError(f"rope type {rope_type!r} in config.json is not known: choose one of {known}")
    parameters["rope_type"] = rope_type
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = number(hf, "rope_theta", DEFAULT_THETA)
    if parameters.get("partial_rotary_factor") is None:
        parameters["partial_rotary_factor"] = number(hf, "partial_rotary_factor", 1.0)
    for name in _NUMBERS:
        value = parameters.get(name)
        if value is not None and not (value == 0 and name.startswith("mscale")):  # 0: none
            parameters[name] = number(parameters, name, 1.0)
    if parameters["partial_rotary_factor"] > 1:
        raise ModelError(
            f"config.json has partial_rotary_factor={parameters['partial_rotary_factor']}: it must be at most 1"
        )
    original = hf.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings"
    )
    limit = positive(hf, "max_position_embeddings")
    parameters["max_position_embeddings"] = limit
    parameters["original_max_position_embeddings"] = original or limit
    positive(parameters, "original_max_position_embeddings")
    return parameters


def position_limit(hf: Parameters) -> int:
    """How many positions the model was made for; yarn's may be written as the original length and a factor."""
    parameters = rope_parameters(hf)
    limit: int = parameters["max_position_embeddings"]
    if parameters["rope_type"] == "yarn" and parameters.get("factor"):
        stretched = int(parameters["original_max_position_embeddings"] * parameters["factor"])
        return min(max(limit, stretched), MAX_SIZE)
    return limit


def rotary_table(hf: Parameters, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim] fp32: a row holds the position's cosines, then its sines."""
    parameters = rope_parameters(hf)
    parameters["num_positions"] = num_positions
    rotary_dim = int(head_dim * parameters["partial_rotary_factor"])
    if rotary_dim < 2:
        raise ModelError(
            f"config.json has partial_rotary_factor={parameters['partial_rotary_factor']}, which leaves nothing to "
            f"rotate of a head of {head_dim}: correct it"
        )
    try:
        frequencies, attention_factor = _FREQUENCIES[parameters["rope_type"]](parameters, rotary_dim)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"rope type {parameters['rope_type']!r} in config.json misses or misspells a setting: {error}"
        ) from error
    table = torch.empty(num_positions, 2 * len(frequencies))  # first: too many positions fail here, at once
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat((angles.cos() * attention_factor, angles.sin() * attention_factor), dim=1, out=table)


def _inverse(base: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (base**exponents)


def _default(parameters: Parameters, rotary_dim: int) -> tuple[Tensor, float]:
    return _inverse(parameters["rope_theta"], rotary_dim), 1.0


def _linear(parameters: Parameters, rotary_dim: int) -> tuple[Tensor, float]:
    return _inverse(parameters["rope_theta"], rotary_dim) / parameters["factor"], 1.0


def _dynamic(parameters: Parameters, rotary_dim: int) -> tuple[Tensor, float]:
    """Dynamic NTK scaling inside the trained length, where it changes nothing.

    Beyond it, the frequencies would depend on a sequence's current length, and cached keys would have to be
    rotated again; the model's position limit stays at the trained length instead.
    """
    _ = parameters["factor"]
    return _default(parameters, rotary_dim)


def _llama3(parameters: Parameters, rotary_dim: int) -> tuple[Tensor, float]:
    """Long waves are slowed by `factor`, short ones stay, the ones between are blended."""
    frequencies = _inverse(parameters["rope_theta"], rotary_dim)
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, slowed), 1.0


def _yarn(parameters: Parameters, rotary_dim: int) -> tuple[Tensor, float]:
    """Interpolates slow dimensions, keeps fast ones, ramps between; attention gets sharper by a factor."""
    base, original = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
    bounds = [
        rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))
        for rotations in (parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1)
    ]
    if parameters.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    waves = base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    kept = 1 - ramp
    frequencies = (1.0 / (factor * waves)) * (1 - kept) + (1.0 / waves) * kept
    return frequencies, _yarn_attention_factor(parameters, factor)


def _longrope(parameters: Parameters, rotary_dim: int) -> tuple[Tensor, float]:
    """Divisors per frequency: `short_factor` where all positions lie in the trained length, else `long_factor`.

    Which of them is decided once, by the longest sequence that is served: keys in the cache are rotated already.
    """
    original = parameters["original_max_position_embeddings"]
    name = "long_factor" if parameters["num_positions"] > original else "short_factor"
    factors = parameters[name]
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        given = len(factors) if isinstance(factors, list) else factors
        raise ModelError(f"config.json has {name} of {given}: {rotary_dim // 2} numbers are needed")
    divisors = torch.tensor(factors, dtype=torch.float32)
    if not bool((divisors > 0).all()) or not bool(divisors.isfinite().all()):
        raise ModelError(f"config.json has {name}={factors!r}: all must be numbers above 0")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _inverse(parameters["rope_theta"], rotary_dim) / divisors, float(attention_factor)


def _yarn_attention_factor(parameters: Parameters, factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if numerator and denominator:
        return _yarn_scale(factor, numerator) / _yarn_scale(factor, denominator)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_FREQUENCIES: dict[str, Callable[[Parameters, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
