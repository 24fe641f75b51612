"""The machine and software that a measurement comes from, from the standard library: never fails, only says less."""

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quire.bench.table import in_bytes
from quire.core.stats import shown
from quire.kernels import build as compilation
from quire.kernels import choose, native
from quire.kernels.registry import REFERENCE
from quire.observe.host import cache_folder, numbers_in

PACKAGES = (
    *("quire", "torch", "numpy", "safetensors", "tokenizers"),
    *("jinja2", "gguf", "huggingface_hub", "triton"),
)
# What the kernels and torch choose by; x86 names as Linux spells them, then ARM's.
NOTED_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
NOTED_ARM_FLAGS = ("asimddp", "i8mm", "bf16", "sve")


def describe_origin() -> dict[str, Any]:
    """Date, machine and versions of a measurement: the head of every record."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


@dataclass(frozen=True, slots=True)
class GpuHardware:
    name: str
    memory_bytes: int
    capability: str
    num_sms: int

    def __str__(self) -> str:
        return f"{self.name}, {in_bytes(self.memory_bytes)}, {self.num_sms} SMs"


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware: a record of every measurement, and what `quire env` shows."""

    system: str = shown("system")
    cpu: str = shown("cpu")
    cpu_flags: list[str] = shown("cpu flags", " ".join, empty="none of note")
    usable_cores: int = shown("cores", "{} physical usable")
    logical_cpus: int | None = shown("cores", "{} logical")
    memory_bytes: int = shown("memory", in_bytes)
    gpus: list[GpuHardware] = shown("gpu", lambda gpus: "; ".join(map(str, gpus)), empty="none")


def this_machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        cpu=cpu_name(),
        cpu_flags=[flag for flag in (*NOTED_FLAGS, *NOTED_ARM_FLAGS) if flag in _cpu_flags()],
        usable_cores=native.default_num_threads(),
        logical_cpus=os.cpu_count(),
        memory_bytes=memory_bytes(),
        gpus=describe_gpus(),
    )


def describe_machine() -> dict[str, Any]:
    return asdict(this_machine())


def describe_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def describe_kernels(*, compiled_only: bool = False) -> dict[str, Any]:
    """The native library. `compiled_only`: say that it is not compiled yet rather than compile it now."""
    report: dict[str, Any] = {"forced_reference": os.environ.get("QUIRE_KERNELS") == "reference"}
    try:
        report["compiler"] = compilation.compiler()
        path = compilation.library_path()
    except (compilation.BuildError, OSError) as error:
        return {**report, "native": False, "reason": " ".join(str(error).split())}
    if compiled_only and not path.exists():
        return {**report, "native": False, "reason": "not compiled yet: the first start does it"}
    if not native.available():
        reason = "does not compile or load: QUIRE_LOG_LEVEL=debug says why"
        return {**report, "native": False, "reason": reason}
    isas = {"isa": native.isa(), "usable_isas": list(native.usable_isas())}
    return {**report, "native": True, **isas, "path": str(path)}


def describe_environment() -> dict[str, str]:
    """Environment variables that change what Quire does; of keys only that they are set."""
    hub = ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")
    prefixes = ("QUIRE_", "OMP_", "MKL_", "CUDA_VISIBLE", "TORCH_", *hub)
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    variables.pop("QUIRE_SHARED", None)  # where tests look for files
    return {name: "(set)" if "KEY" in name else value for name, value in variables.items()}


def describe_places() -> dict[str, str]:
    return {"python": sys.executable, "package": str(Path(__file__).parents[1]), "cache": str(cache_folder())}


def describe_gpus() -> list[GpuHardware]:
    if not torch.cuda.is_available():
        return []
    return [
        GpuHardware(gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}", gpu.multi_processor_count)
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def cpu_name() -> str:
    for line in _cpu_info():
        if line.startswith(("model name", "Model name")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def resident_bytes() -> dict[str, int]:
    """This process now: `current` and `peak`, and of the current what is its own (`anonymous`) or mapped files."""
    names = {"VmRSS": "current", "VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "mapped_files"}
    kilobytes = numbers_in(Path("/proc/self/status"))
    return {name: kilobytes[key] << 10 for key, name in names.items() if key in kilobytes}


def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _cpu_flags() -> set[str]:
    for line in _cpu_info():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


# ---------------------------------------------------------------------- measured rates

PROBE_BYTES = 256 << 20  # more than most caches hold
PROBE_SECONDS = 0.4
PROBE_COLUMNS = 4096


def cpu_read_rate() -> float:
    """Bytes per second of a GEMV, the work of a decode step: the best of many with torch's kernel and the engine's."""
    matrix, vector = torch.ones(PROBE_BYTES // 4 // PROBE_COLUMNS, PROBE_COLUMNS), torch.ones(PROBE_COLUMNS)
    rate = PROBE_BYTES / best_seconds(lambda: matrix @ vector)
    kernel = choose("int8_linear", torch.device("cpu"))
    if kernel.__name__.endswith(REFERENCE):
        return rate
    native.set_num_threads(native.default_num_threads())
    num_rows = PROBE_BYTES // PROBE_COLUMNS
    # pages that were never written are not read
    packed = kernel.empty_packed(num_rows, PROBE_COLUMNS).fill_(1)
    scales, sums = torch.ones(num_rows), torch.full((num_rows,), PROBE_COLUMNS, dtype=torch.int32)
    row, out = torch.ones(1, PROBE_COLUMNS), torch.empty(1, num_rows)
    return max(rate, PROBE_BYTES / best_seconds(lambda: kernel.linear(row, packed, scales, sums, out=out)))


def best_seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest call within PROBE_SECONDS."""
    work()  # the first touch is slower
    best, ends = float("inf"), time.perf_counter() + PROBE_SECONDS
    while (started := time.perf_counter()) < ends:
        work()
        best = min(best, time.perf_counter() - started)
    return best
