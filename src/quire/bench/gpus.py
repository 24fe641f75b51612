"""GPUs as their makers describe them.

`bandwidth` and `flops` are the data sheets' (bf16 with dense matrices; fp16 where there is no bf16). `memory` is
what PyTorch reports as the device's total, which is less than the name says. `measured` is a read rate that this
project measured itself; where there is one it sets the floor.
"""

import re
from dataclasses import dataclass

from quire.core.errors import ConfigError

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second
    flops: float  # per second
    source: str
    measured: float | None = None  # bytes per second
    has_bfloat16: bool = True

    @property
    def read_rate(self) -> float:
        return self.measured or self.bandwidth


GPUS = (
    Gpu(
        "H200", int(139.8 * GiB), 4.80e12, 989e12, "NVIDIA H200 data sheet, SXM; read rate measured", 4.26e12
    ),
    Gpu("H100", int(79.1 * GiB), 3.35e12, 989e12, "NVIDIA H100 data sheet, SXM5"),
    Gpu("H100-PCIe", int(79.1 * GiB), 2.00e12, 756e12, "NVIDIA H100 data sheet, PCIe"),
    Gpu("A100-80", int(79.2 * GiB), 2.04e12, 312e12, "NVIDIA A100 data sheet, SXM4 80 GB"),
    Gpu("A100-40", int(39.4 * GiB), 1.555e12, 312e12, "NVIDIA A100 data sheet, 40 GB"),
    Gpu("L40S", int(44.4 * GiB), 0.864e12, 362e12, "NVIDIA L40S data sheet"),
    Gpu("L4", int(22.0 * GiB), 0.300e12, 121e12, "NVIDIA L4 data sheet"),
    Gpu("A10", int(22.0 * GiB), 0.600e12, 125e12, "NVIDIA A10 data sheet"),
    Gpu("T4", int(14.6 * GiB), 0.320e12, 65e12, "NVIDIA T4 data sheet, fp16", has_bfloat16=False),
    Gpu("RTX-4090", int(23.5 * GiB), 1.008e12, 165e12, "NVIDIA Ada architecture white paper"),
    Gpu(
        "V100",
        int(31.7 * GiB),
        0.900e12,
        125e12,
        "NVIDIA V100 data sheet, SXM2 32 GB, fp16",
        has_bfloat16=False,
    ),
)


def find_gpu(name: str) -> Gpu:
    """By name, however it is spelled: "rtx 4090", "4090", "A100 80GB", or as PyTorch reports it."""
    wanted = _words(name)
    for gpu in GPUS:
        if "".join(_words(gpu.name)) == "".join(wanted):
            return gpu
    within = [gpu for gpu in GPUS if set(_words(gpu.name)) <= set(wanted)]
    if within:  # "NVIDIA H100 PCIe" is an H100, but more exactly an H100-PCIe
        return max(within, key=lambda gpu: len(_words(gpu.name)))
    around = [gpu for gpu in GPUS if wanted and set(wanted) <= set(_words(gpu.name))]
    if len(around) == 1:
        return around[0]
    if around:
        raise ConfigError(f"--gpu {name} may be {' or '.join(gpu.name for gpu in around)}: name one")
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigError(f"--gpu {name} is not in the table ({known}): give --memory and --bandwidth instead")


def _words(name: str) -> list[str]:
    return [word.removesuffix("gb") for word in re.findall(r"[a-z0-9]+", name.lower())]
