"""Which number format serves: from what the user asked for, the device and the checkpoint."""

import torch

from quire.core.errors import ConfigError
from quire.quant.format import NumberFormat
from quire.quant.full import FullPrecision
from quire.quant.int8 import Int8


def choose_format(
    device: str | torch.device,
    dtype: str = "auto",
    quantization: str = "auto",
    checkpoint_dtype: str = "float32",
) -> NumberFormat:
    """`auto` is int8 on the CPU and the checkpoint's own type elsewhere; a named dtype means full precision."""
    device = torch.device(device)
    if quantization == "auto":
        quantization = "int8" if device.type == "cpu" and dtype == "auto" else "none"
    if quantization == "int8":
        return _int8(device, dtype)
    if quantization != "none":
        raise ConfigError(f"quantization={quantization!r} is not known: choose auto, none or int8")
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else checkpoint_dtype
    return FullPrecision(getattr(torch, dtype), device)


def _int8(device: torch.device, dtype: str) -> NumberFormat:
    if device.type != "cpu":
        raise ConfigError(f"quantization='int8' runs on the CPU only, not on {device.type}: choose none")
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"quantization='int8' computes in float32, not in {dtype}: leave dtype at auto")
    return Int8(device)
