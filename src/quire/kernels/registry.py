"""Which alternative of an operation serves on which device. Chosen once, at construction."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import torch

from quire.kernels import native

REFERENCE = "reference"

# Every operation and its alternatives beside the reference, best first, as (name, device type).
# The parity test walks this table, so an alternative that is not listed here does not exist.
_ALTERNATIVES: dict[str, tuple[tuple[str, str], ...]] = {
    "activation": (("cpu", "cpu"), ("triton", "cuda")),
    "attention": (("cpu", "cpu"), ("triton", "cuda")),
    "embedding": (("cpu", "cpu"), ("triton", "cuda")),
    "encoded_linear": (("cpu", "cpu"), ("cuda", "cuda")),
    "fp8_rows": (("triton", "cuda"),),
    "inputs": (("triton", "cuda"),),
    "int8_linear": (("cpu", "cpu"),),
    "invariant_linear": (("triton", "cuda"),),
    "linear": (("cublas", "cuda"),),
    "lora": (("cpu", "cpu"), ("triton", "cuda")),
    "lora_pack": (("cpu", "cpu"), ("host", "cuda"), ("triton", "cuda")),
    "moe": (("cpu", "cpu"), ("triton", "cuda")),
    "narrow_linear": (("triton", "cuda"),),
    "norm": (("cpu", "cpu"), ("triton", "cuda")),
    "packed_attention": (("cuda", "cuda"), ("triton", "cuda")),
    "pages": (("cpu", "cpu"), ("triton", "cuda")),
    "rotary": (("cpu", "cpu"), ("triton", "cuda")),
    "sample": (("cpu", "cpu"), ("triton", "cuda")),
    "trees": (("triton", "cuda"),),
}


def forces_reference() -> bool:
    """Whether the user asked for plain torch."""
    return os.environ.get("QUIRE_KERNELS", "") == REFERENCE


def keep_threads() -> Callable[[], None]:
    """Gives the thread that calls the result as many threads as this one has now, for native operations and torch's."""
    of_torch = torch.get_num_threads()
    of_native = native.num_threads() if not forces_reference() and native.available() else None

    def keep() -> None:
        if torch.get_num_threads() != of_torch:
            torch.set_num_threads(of_torch)
        if of_native is not None:
            native.set_num_threads(of_native)

    return keep


def operations() -> tuple[str, ...]:
    """Names of all operations."""
    return tuple(_ALTERNATIVES)


def listed(operation: str) -> tuple[str, ...]:
    """Alternatives of an operation beside the reference, whether or not they can run here."""
    return tuple(name for name, _ in _ALTERNATIVES[operation])


def alternatives(operation: str) -> tuple[str, ...]:
    """Alternatives of an operation beside the reference that can run on this machine."""
    return tuple(name for name, _ in _ALTERNATIVES[operation] if can_run(name))


def load(operation: str, alternative: str) -> ModuleType:
    """The module of one named alternative."""
    if operation not in _ALTERNATIVES:
        raise ValueError(f"unknown operation {operation!r}; known are {', '.join(_ALTERNATIVES)}")
    return importlib.import_module(f"quire.kernels.{operation}.{alternative}")


def choose(operation: str, device: str | torch.device) -> ModuleType:
    """The best alternative of `operation` for `device`; with QUIRE_KERNELS=reference the reference.

    The answer may be kept: call this when a layer is built, not when it runs.
    """
    kind = torch.device(device).type
    if not forces_reference():
        for name, alternative_kind in _ALTERNATIVES.get(operation, ()):
            if alternative_kind == kind and can_run(name):
                return load(operation, name)
    return load(operation, REFERENCE)


def can_run(alternative: str) -> bool:
    """Whether this machine has what the alternative needs. For "cpu" it compiles native code, which takes a minute."""
    if alternative == "cpu":
        return native.available()
    if alternative == "host":
        return True
    if alternative in ("cublas", "cuda"):
        return torch.cuda.is_available()
    return importlib.util.find_spec("triton") is not None and (
        torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    )
