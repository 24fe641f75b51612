"""What machine and software a figure comes from. Nothing here is worth failing for."""

import importlib.metadata
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quire.kernels import build as compilation
from quire.kernels import native
from quire.weights.cache import cache_folder

PACKAGES = (
    "quire",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "gguf",
    "huggingface_hub",
    "triton",
)
# What the kernels and torch choose by; x86 names as Linux spells them, then ARM's.
NOTED_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
NOTED_ARM_FLAGS = ("asimddp", "i8mm", "bf16", "sve")


def describe_origin() -> dict[str, Any]:
    """When, where and with what a figure was taken: what every record begins with."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def describe_machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cpu": cpu_name(),
        "cpu_flags": [flag for flag in (*NOTED_FLAGS, *NOTED_ARM_FLAGS) if flag in _cpu_flags()],
        "logical_cpus": os.cpu_count(),
        "usable_cores": native.default_num_threads(),
        "memory_bytes": memory_bytes(),
        "gpus": describe_gpus(),
    }


def describe_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def describe_kernels(*, compiled_only: bool = False) -> dict[str, Any]:
    """The native library. `compiled_only`: say that it is not compiled yet rather than compile it now."""
    found: dict[str, Any] = {"forced_reference": os.environ.get("QUIRE_KERNELS") == "reference"}
    try:
        found["compiler"] = compilation.compiler()
        path = compilation.library_path()
    except (compilation.BuildError, OSError) as error:
        return {**found, "native": False, "reason": " ".join(str(error).split())}
    if compiled_only and not path.exists():
        return {**found, "native": False, "reason": "not compiled yet: the first start does it"}
    if not native.available():
        return {
            **found,
            "native": False,
            "reason": "does not compile or load: QUIRE_LOG_LEVEL=debug says why",
        }
    return {
        **found,
        "native": True,
        "isa": native.isa(),
        "usable_isas": list(native.usable_isas()),
        "path": str(path),
    }


def describe_environment() -> dict[str, str]:
    """Environment variables that change what Quire does; of keys only that they are set."""
    prefixes = (
        "QUIRE_",
        "OMP_",
        "MKL_",
        "CUDA_VISIBLE",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "HF_ENDPOINT",
        "TORCH_",
    )
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    return {name: "(set)" if "KEY" in name else value for name, value in found.items()}


def describe_places() -> dict[str, str]:
    return {"python": sys.executable, "package": str(Path(__file__).parents[1]), "cache": str(cache_folder())}


def describe_gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


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
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {names[key]: int(value.split()[0]) * 1024 for key, value in pairs if key in names}


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
