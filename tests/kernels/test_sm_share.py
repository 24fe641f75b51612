"""--sm-share on a stand-in for the driver: whole groups, refusals, streams and grids."""

import os
import threading
from contextlib import nullcontext
from ctypes import sizeof
from types import SimpleNamespace

import pytest
import torch

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build.report import running_on
from quire.kernels import sm_share
from quire.kernels.attention.triton_plan import multiprocessors
from quire.link.worker import _on_its_gpu
from quire.observe.host import MPS_PERCENTAGE
from quire.runner import warmup
from quire.runner.cuda import CudaOps

GPU = torch.device("cuda", 0)
GIVEN = 64  # of 132, by the driver


class Driver:
    """Green contexts that number their streams; of calls only what cuda.h promises."""

    made = 0

    def cuDeviceGet(self, device, ordinal) -> int:
        device._obj.value = 5 + ordinal.value
        return 0

    def cuDeviceGetDevResource(self, device, resource, kind) -> int:
        assert (device.value, kind.value, sizeof(resource._obj) >= 144) == (5, 1, True)
        resource._obj[24] = 132
        return 0

    def cuDevSmResourceSplitByCount(self, result, num_groups, given, rest, flags, least) -> int:
        assert (num_groups._obj.value, given._obj[24], rest, flags.value) == (1, 132, None, 0)
        result._obj[24] = least.value
        return 0

    def cuDevResourceGenerateDesc(self, description, resources, count) -> int:
        assert (resources._obj[24], count.value) == (GIVEN, 1)
        description._obj.value = 6
        return 0

    def cuGreenCtxCreate(self, handle, description, device, flags) -> int:
        assert (description.value, device.value, flags.value) == (6, 5, 1)
        handle._obj.value = 7
        return 0

    def cuGreenCtxGetDevResource(self, handle, resource, kind) -> int:
        assert (handle.value, kind.value) == (7, 1)
        resource._obj[24] = GIVEN
        return 0

    def cuGreenCtxStreamCreate(self, stream, handle, flags, priority) -> int:
        assert (handle.value, flags.value, priority.value) == (7, 1, 0)
        self.made += 1
        stream._obj.value = self.made
        return 0


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU like an H200, without MPS; gives the number of the stream that each thread uses."""
    used: dict[int, int] = {}
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv(MPS_PERCENTAGE, raising=False)
    monkeypatch.setattr(sm_share, "_entered", [])
    green = Driver()
    monkeypatch.setattr(sm_share, "driver", lambda: green)
    monkeypatch.setattr(sm_share, "check_products", lambda device: None)
    card = SimpleNamespace(multi_processor_count=132, major=9)
    for name, value in {
        "current_device": lambda: 0,
        "synchronize": lambda device: None,
        "device": nullcontext,
        "get_device_properties": lambda device: card,
        "get_device_name": lambda device: "NVIDIA H200",
        "set_stream": lambda stream: used.update({threading.get_ident(): stream.cuda_stream}),
        "Stream": lambda device: "a plain stream",
        "ExternalStream": lambda stream, device: SimpleNamespace(cuda_stream=stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return used


@pytest.mark.parametrize("whole", [True, False])
def test_a_percentage_with_which_cublas_is_wrong_is_refused(monkeypatch, whole):
    monkeypatch.setenv(MPS_PERCENTAGE, "43")
    product = torch.mm

    def products(x, weight, out):
        product(x, weight, out=out if whole else out[:, :-256].contiguous())

    monkeypatch.setattr(torch, "mm", products)
    if whole:
        sm_share.check_products(torch.device("cpu"))
        return
    with pytest.raises(ConfigError, match=f"{MPS_PERCENTAGE}=43 cannot be used .* give another percentage"):
        sm_share.check_products(torch.device("cpu"))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ConfigError, match=r"sm_share=.* is outside \(0, 1\]"):
        EngineConfig.of(sm_share=share)


@pytest.mark.parametrize(
    ("share", "total", "major", "sms"),
    [(0.5, 132, 9, 64), (0.07, 132, 9, 8), (0.99, 132, 9, 128), (0.29, 100, 8, 28), (0.04, 108, 8, 4)],
)  # fmt: skip
def test_a_share_is_whole_groups_of_sms_and_never_more_than_asked_for(share, total, major, sms):
    assert sm_share.whole_groups(share, total, major) == sms


def test_a_share_below_one_group_is_refused_with_the_least():
    with pytest.raises(
        ConfigError, match=r"sm_share=0.06 of 132 SMs is 7.9, .* 8 or more: give at least 0.07"
    ):
        sm_share.whole_groups(0.06, 132, 9)


def test_every_thread_launches_within_the_share_and_grids_have_its_size(gpu):
    assert (multiprocessors(GPU), sm_share.capture_stream()) == (132, None)
    sm_share.enter(0.5, GPU)
    assert multiprocessors(GPU) == sm_share.num_sms(GPU) == GIVEN
    assert gpu == {threading.get_ident(): 1}
    gpu.clear()
    ops = CudaOps.__new__(CudaOps)
    other = threading.Thread(target=ops.submit, args=(threading.get_ident,))  # such as AsyncLLM's
    other.start()
    other.join()
    assert list(gpu.values()) == [1]
    gpu.clear()
    warmup.KernelWarmup(GPU, lambda: None).join()
    assert list(gpu.values()) == [1]
    assert (sm_share.capture_stream().cuda_stream, sm_share.side_stream(GPU).cuda_stream) == (2, 3)
    precision = SimpleNamespace(device=GPU, format_name="bfloat16")
    assert running_on(precision, 1) == "bfloat16 on NVIDIA H200, 64 of 132 SMs (green context)"


def test_a_whole_gpu_has_no_stream_of_its_own(gpu):
    sm_share.enter(1.0, GPU)
    assert (sm_share.side_stream(GPU), sm_share.num_sms(GPU), gpu) == ("a plain stream", 132, {})
    assert sm_share.gpu_name(GPU) == "NVIDIA H200"


@pytest.mark.parametrize("shares", [(0.5, 0.25), (0.5, 1.0), (1.0, 0.5)])
def test_a_process_has_one_share(gpu, shares):
    sm_share.enter(shares[0], GPU)
    sm_share.enter(shares[0], GPU)
    with pytest.raises(ConfigError, match="a process of its own"):
        sm_share.enter(shares[1], GPU)


class OldDriver(Driver):
    cuGreenCtxStreamCreate = property()  # such as that of CUDA 12.4


class RefusingDriver(Driver):
    def cuGreenCtxCreate(self, handle, description, device, flags) -> int:
        return 801


def _no_driver() -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (OldDriver, "cuGreenCtxStreamCreate"),
        (RefusingDriver, "CUDA answered with status 801$"),
        (_no_driver, "cannot open shared object file$"),
    ],
)
def test_what_has_no_green_contexts_is_named_with_the_remedy(gpu, monkeypatch, driver, why):
    monkeypatch.setattr(sm_share, "driver", driver)
    with pytest.raises(
        ConfigError, match=f"sm_share=0.5 needs .* update it, or start an MPS daemon: .*{why}"
    ):
        sm_share.enter(0.5, GPU)


def test_under_mps_the_percentage_is_set_before_cuda_starts(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    half = EngineConfig.of(sm_share=0.5)
    _on_its_gpu(half)
    assert MPS_PERCENTAGE not in os.environ  # no daemon
    (tmp_path / "control").touch()
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    pid.write_text("4194304999\n")
    _on_its_gpu(half)
    assert MPS_PERCENTAGE not in os.environ, "it was killed and left its pipe"
    pid.write_text(f"{os.getpid()}\n")
    with pytest.raises(ConfigError, match=f"not set: start the program with {MPS_PERCENTAGE}=50"):
        sm_share.enter(0.5, GPU)
    _on_its_gpu(half)
    sm_share.enter(0.5, GPU)
    assert sm_share.gpu_name(GPU) == "NVIDIA H200, 132 SMs (MPS, 50 %)"
    assert (sm_share.side_stream(GPU), gpu) == ("a plain stream", {})
