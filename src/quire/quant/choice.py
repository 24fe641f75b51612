"""Which number format serves: from what the user asked for, the device and the checkpoint."""

import torch

from quire.core.errors import ConfigError
from quire.quant.format import NumberFormat
from quire.quant.fp8 import Fp8
from quire.quant.full import FullPrecision
from quire.quant.int8 import Int8


def choose_format(
    device: str | torch.device,
    dtype: str = "auto",
    quantization: str = "auto",
    checkpoint_dtype: str = "float32",
    deterministic: bool = False,
) -> NumberFormat:
    """`auto` is int8 on the CPU and the checkpoint's own type elsewhere; a named dtype means full precision."""
    device = torch.device(device)
    if quantization == "auto":
        quantization = "int8" if device.type == "cpu" and dtype == "auto" else "none"
    if quantization == "int8":
        return _int8(device, dtype)
    if quantization not in ("none", "fp8"):
        raise ConfigError(f"quantization={quantization!r} is not known: choose auto, none, int8 or fp8")
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else checkpoint_dtype
    if quantization == "fp8":
        return _fp8(device, dtype, deterministic)
    return FullPrecision(getattr(torch, dtype), device, deterministic and device.type != "cpu")


def _fp8(device: torch.device, dtype: str, deterministic: bool) -> NumberFormat:
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(
            "quantization='fp8' needs a GPU with float8 matrix units (compute 8.9 or later): choose none"
        )
    if deterministic:
        raise ConfigError("quantization='fp8' has no deterministic GEMMs: leave out one of the two")
    return Fp8(torch.bfloat16 if dtype == "float32" else getattr(torch, dtype), device)


def _int8(device: torch.device, dtype: str) -> NumberFormat:
    if device.type != "cpu":
        raise ConfigError(f"quantization='int8' runs on the CPU only, not on {device.type}: choose none")
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"quantization='int8' computes in float32, not in {dtype}: leave dtype at auto")
    return Int8(device)
