"""`--sm-share`: the engines of a process keep to some of a GPU's SMs, by a green context or by MPS.

What is launched on a stream of a green context runs on its SMs, from any thread; so does a graph captured on one.
Memory, modules and cuBLAS handles are the device's own. The default stream and plain streams have all SMs, and are
not ordered with the others: engines use the streams of this file. The driver makes them, since PyTorch does from 2.12
on only. Names and numbers are those of cuda.h.
"""

import os
from ctypes import byref, c_int, c_uint, c_void_p
from dataclasses import dataclass

import torch

from quire.core.errors import ConfigError
from quire.kernels.nvrtc import check, driver
from quire.observe.host import MPS_PERCENTAGE, mps_percentage

_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which is required
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, too
_Resource = c_uint * 64  # CUdevResource has 144 bytes by CUDA 12.4 to 13.1
_SM_COUNT = 96 // 4  # where it has them


@dataclass(frozen=True, slots=True)
class _GreenContext:
    """Lives as long as the process, as its streams do."""

    handle: c_void_p
    index: int  # of the GPU

    @classmethod
    def create(cls, num_sms: int, index: int) -> "_GreenContext":
        """Needs the device's primary context."""
        device, all_sms, some, num_groups = c_int(), _Resource(), _Resource(), c_uint(1)
        check(driver().cuDeviceGet(byref(device), c_int(index)))
        check(driver().cuDeviceGetDevResource(device, byref(all_sms), c_int(_SM_RESOURCE)))
        check(
            driver().cuDevSmResourceSplitByCount(
                byref(some), byref(num_groups), byref(all_sms), None, c_uint(0), c_uint(num_sms)
            )
        )
        description, handle = c_void_p(), c_void_p()
        check(driver().cuDevResourceGenerateDesc(byref(description), byref(some), c_uint(1)))
        check(driver().cuGreenCtxCreate(byref(handle), description, device, c_uint(_DEFAULT_STREAM)))
        return cls(handle, index)

    def stream(self) -> torch.cuda.Stream:
        stream = c_void_p()
        check(driver().cuGreenCtxStreamCreate(byref(stream), self.handle, c_uint(_NON_BLOCKING), c_int(0)))
        return torch.cuda.ExternalStream(stream.value, self.index)

    @property
    def num_sms(self) -> int:
        """What the driver gave, which may differ from what was asked for."""
        resource = _Resource()
        check(driver().cuGreenCtxGetDevResource(self.handle, byref(resource), c_int(_SM_RESOURCE)))
        return int(resource[_SM_COUNT])


@dataclass(frozen=True, slots=True)
class _Entered:
    share: float
    index: int  # of the GPU
    in_words: str = ""
    num_sms: int = 0
    context: _GreenContext | None = None  # None: all SMs, or MPS limits them
    stream: torch.cuda.Stream | None = None
    capture: torch.cuda.Stream | None = None


_entered: list[_Entered] = []  # at most one: neither a process nor its streams can have two shares


def enter(share: float, device: torch.device) -> None:
    """Before the first allocation of an engine. ConfigError where this device cannot be shared so."""
    if device.type != "cuda":
        if share < 1.0:
            remedy = "leave it out, and limit a CPU by num_threads or pinned cores"
            raise ConfigError(f"sm_share={share} is for NVIDIA GPUs, not for {device.type}: {remedy}")
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if not _entered:
        made = _Entered(share, index) if share == 1.0 else _limited(share, index)
        if MPS_PERCENTAGE in os.environ:
            check_products(torch.device("cuda", index))
        _entered.append(made)
    before = _entered[0]
    if share != before.share or (share < 1.0 and index != before.index):
        raise ConfigError(
            f"sm_share={share} on GPU {index}: this process had an engine with sm_share={before.share} on GPU "
            f"{before.index}; give the other share a process of its own"
        )
    use_stream()


def use_stream() -> None:
    """The calling thread launches on the share's SMs from now on."""
    if _entered and _entered[0].stream is not None:
        torch.cuda.set_stream(_entered[0].stream)


def capture_stream() -> torch.cuda.Stream | None:
    """For `torch.cuda.graph`; None: its own."""
    return _entered[0].capture if _entered else None


def side_stream(device: torch.device) -> torch.cuda.Stream:
    context = _entered[0].context if _entered else None
    return torch.cuda.Stream(device) if context is None else context.stream()


def num_sms(device: torch.device) -> int:
    """SMs that run this process's kernels: grids are sized by it. MPS limits what CUDA reports itself. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if _entered and _entered[0].context is not None:
        return _entered[0].num_sms
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def gpu_name(device: torch.device) -> str:
    """With the share, if there is one: times measured within it are not those of the whole GPU."""
    return torch.cuda.get_device_name(device) + (_entered[0].in_words if _entered else "")


def whole_groups(share: float, total: int, major: int) -> int:
    """SMs of a share, down to whole groups of the compute capability (cuda.h). ConfigError if there is none."""
    least, group = (8, 8) if major >= 9 else (4, 2) if major == 8 else (2, 2)
    wanted = int(share * total + 1e-6)
    if wanted < least:
        raise ConfigError(
            f"sm_share={share} of {total} SMs is {share * total:.1f}, and this GPU is divided into {least} or more: "
            f"give at least {least / total + 0.005:.2f}"
        )
    return wanted // group * group


def check_products(device: torch.device) -> None:
    """ConfigError where cuBLAS leaves parts of its results unwritten, as cuBLAS 13.0 does under MPS with 18, 56, 98,
    104 and 112 of an H200's 132 SMs, by most of its algorithms.
    """
    weight = torch.zeros(6144, 4096, dtype=torch.bfloat16, device=device)
    for num_tokens in (1, 16, 64, 300, 2048):
        out = torch.full((num_tokens, 6144), float("nan"), dtype=torch.bfloat16, device=device)
        torch.mm(weight.new_zeros(num_tokens, 4096), weight.t(), out=out)
        if not out.isfinite().all():
            raise ConfigError(
                f"{MPS_PERCENTAGE}={os.environ.get(MPS_PERCENTAGE)} cannot be used on this GPU: cuBLAS leaves parts of "
                f"results unwritten with {num_sms(device)} SMs under MPS; give another percentage (5, 10, 90 and 95 "
                "are right on an H200), or --sm-share without an MPS daemon"
            )


def _limited(share: float, index: int) -> _Entered:
    properties = torch.cuda.get_device_properties(index)
    total = properties.multi_processor_count
    if (percentage := mps_percentage(share)) is not None:
        if (actual := os.environ.get(MPS_PERCENTAGE, "not set")) != percentage:
            raise ConfigError(
                f"sm_share={share}: an MPS daemon runs here, and CUDA reads {MPS_PERCENTAGE} when it starts, which is "
                f"{actual}: start the program with {MPS_PERCENTAGE}={percentage}"
            )
        return _Entered(share, index, f", {total} SMs (MPS, {percentage} %)")
    wanted_sms = whole_groups(share, total, properties.major)
    try:
        torch.cuda.synchronize(index)  # a green context needs the device's primary context
        context = _GreenContext.create(wanted_sms, index)
        given = context.num_sms
        if not 0 < given <= total:
            raise RuntimeError(f"the driver reports {given} of {total} SMs")
        stream, capture = context.stream(), context.stream()
    except (AttributeError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"sm_share={share} needs green contexts, which the driver has from CUDA 12.5 on; update it, or start an "
            "MPS daemon: " + str(error).partition("\n")[0]
        ) from error
    words = f", {given} of {total} SMs (green context)"
    return _Entered(share, index, words, given, context, stream, capture)
