"""Reads config.json values with names that people can follow when one is missing or makes no sense."""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import ModelError

DTYPES = ("float32", "float16", "bfloat16")


def positive(hf: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    value = hf.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {name}: add it, or take the model's own config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json has {name}={value!r}, which must be a whole number of at least 1")
    return value


def head_size(hf: Mapping[str, Any], hidden_size: int, num_heads: int, default: int | None = None) -> int:
    """`head_dim`, or the default, or hidden_size / num_heads where that divides."""
    value = hf.get("head_dim") or default
    if value is not None:
        return int(value)
    if hidden_size % num_heads != 0:
        raise ModelError(f"hidden size {hidden_size} is not a multiple of {num_heads} heads: give head_dim")
    return hidden_size // num_heads


def checkpoint_dtype(hf: Mapping[str, Any]) -> str:
    """The type that the checkpoint says it has; float32 where it says nothing that we know."""
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPES else "float32"


def token_ids(hf: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One id, several, or none."""
    value = hf.get(name)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def first_token_id(hf: Mapping[str, Any], name: str) -> int | None:
    return next(iter(token_ids(hf, name)), None)
