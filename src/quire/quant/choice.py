"""Which number format serves: from what the user asked for, the device and the checkpoint."""

import torch

from quire.core.config import QUANTIZATIONS
from quire.core.errors import ConfigError
from quire.quant.codebook import CodeBook
from quire.quant.encoded import Scheme
from quire.quant.encoded_matrix import Checkpoint, LowBit
from quire.quant.format import NumberFormat
from quire.quant.fp8 import Fp8
from quire.quant.full import FullPrecision
from quire.quant.int4 import GROUPS, Int4
from quire.quant.int8 import Int8
from quire.quant.llm_int8 import LlmInt8
from quire.quant.scaled import Scaled
from quire.quant.schemes import prefers_blocks

GGUF = "gguf"  # the method of GGUF files in `quantization_config`
LOW_BIT: dict[str, tuple[Scheme, ...]] = {  # tried for rows of a length in this order
    "int4": tuple(Int4(group) for group in GROUPS),
    "int8": (Scaled("int8"),),  # on a GPU: weights only
    "nf4": (CodeBook("nf4"),),
    "fp4": (CodeBook("fp4"),),
}

NO_FLOAT8 = "quantization='fp8' needs a GPU with float8 matrix units (compute 8.9 or later): choose none"
NO_FLOAT8_KV = "kv_cache_dtype='fp8' needs a GPU that has float8 (compute 8.9 or later): choose int8"


def choose_format(
    device: str | torch.device,
    dtype: str = "auto",
    quantization: str = "auto",
    checkpoint_dtype: str = "float32",
    deterministic: bool = False,
    quantized: str = "",
) -> NumberFormat:
    """`auto` keeps what a checkpoint that is `quantized` by some method has, GGUF's blocks unless the CPU has AMX or
    results must be deterministic; otherwise it is int8 on the CPU and the checkpoint's own type elsewhere, and a named
    dtype means full precision.
    """
    device = torch.device(device)
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={quantization!r} is not known: choose one of {', '.join(QUANTIZATIONS)}"
        )
    by_default = dtype == "auto" if device.type == "cpu" else not deterministic
    blocks = by_default and prefers_blocks(device)
    if quantization == "auto" and quantized and (quantized != GGUF or blocks):
        quantization = "checkpoint"
    if quantization == "auto":
        quantization = "int8" if device.type == "cpu" and dtype == "auto" else "none"
    if quantization == "llm-int8" or (quantization == "int8" and device.type == "cpu"):
        return _int8(device, dtype, quantization)
    asked = dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else checkpoint_dtype
    if quantization == "fp8":
        return _fp8(device, dtype, deterministic)
    activations = getattr(torch, dtype)
    if quantization == "none":
        return FullPrecision(activations, device, deterministic and device.type != "cpu")
    if deterministic and device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} has no deterministic GEMMs on a GPU: leave out one of the two, or choose "
            "none, which decodes the weights"
        )
    exact = device.type == "cpu" and asked != "auto"  # the CPU's kernels round activations
    if quantization == "checkpoint":
        return Checkpoint(activations, device, exact)
    return LowBit(quantization, LOW_BIT[quantization], activations, device, exact)


def check_float8(gpu: str, has_units: bool, quantization: str, kv_cache_dtype: str) -> None:
    """ConfigError where a GPU that is not here has no float8 and a setting asks for it."""
    for value, refusal in ((quantization, NO_FLOAT8), (kv_cache_dtype, NO_FLOAT8_KV)):
        if value == "fp8" and not has_units:
            raise ConfigError(f"{gpu}: {refusal}")


def has_float8(device: torch.device) -> bool:
    """ "meta" stands for a GPU that is not here, which `check_float8` has checked."""
    return device.type == "meta" or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def _fp8(device: torch.device, dtype: str, deterministic: bool) -> NumberFormat:
    if not has_float8(device):
        raise ConfigError(NO_FLOAT8)
    if deterministic:
        raise ConfigError("quantization='fp8' has no deterministic GEMMs: leave out one of the two")
    return Fp8(torch.bfloat16 if dtype == "float32" else getattr(torch, dtype), device)


def _int8(device: torch.device, dtype: str, quantization: str) -> NumberFormat:
    if device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} runs on the CPU only: choose none, int8, int4 or nf4"
        )
    if dtype not in ("auto", "float32"):
        raise ConfigError(
            f"quantization={quantization!r} computes in float32, not in {dtype}: leave dtype at auto"
        )
    return Int8(device) if quantization == "int8" else LlmInt8(device)
