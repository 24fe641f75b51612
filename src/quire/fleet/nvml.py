"""The MIG table of the GPU that is here, as NVML tells it: read only, and with MIG switched off too."""

import ctypes

from quire.core.errors import ConfigError
from quire.fleet.mig import Card, Profile

LIBRARY = "libnvidia-ml.so.1"
_NUM_PROFILES = 32  # ids that are asked; NVML refuses what the GPU has not
_NAME_BYTES = 96


class _ProfileInfo(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint), ("id", ctypes.c_uint), ("is_p2p", ctypes.c_uint), ("slices", ctypes.c_uint),
        ("instances", ctypes.c_uint), ("sms", ctypes.c_uint), ("copy", ctypes.c_uint), ("decoders", ctypes.c_uint),
        ("encoders", ctypes.c_uint), ("jpeg", ctypes.c_uint), ("ofa", ctypes.c_uint), ("megabytes", ctypes.c_ulonglong),
        ("name", ctypes.c_char * _NAME_BYTES),
    )  # fmt: skip


class _MigPlacement(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint), ("size", ctypes.c_uint))


def read_card(index: int = 0, library: str = LIBRARY) -> tuple[str, tuple[Profile, ...]]:
    """The GPU's name and its slices, without variants such as +me. ConfigError where there is no driver, GPU or MIG."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise ConfigError(
            f"--mig auto needs NVIDIA's driver, and it is not here ({error}): name the GPU, as in --mig h100"
        ) from error
    if code := nvml.nvmlInit_v2():
        raise ConfigError(f"--mig auto: NVML does not start (error {code}): name the GPU, as in --mig h100")
    try:
        return _read(nvml, index)
    finally:
        nvml.nvmlShutdown()


def _read(nvml: ctypes.CDLL, index: int) -> tuple[str, tuple[Profile, ...]]:
    device, title = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
    if code or nvml.nvmlDeviceGetName(device, title, ctypes.c_uint(_NAME_BYTES)):
        raise ConfigError(
            f"--mig auto: NVML finds no GPU {index} (error {code}): name the GPU, as in --mig h100"
        )
    profiles = []
    for kind in range(_NUM_PROFILES):
        info = _ProfileInfo(version=ctypes.sizeof(_ProfileInfo) | 2 << 24)
        if nvml.nvmlDeviceGetGpuInstanceProfileInfoV(device, ctypes.c_uint(kind), ctypes.byref(info)):
            continue
        name = info.name.decode().removeprefix("MIG ")
        if "+" in name or "-" in name:
            continue
        placements = (_MigPlacement * 32)()
        count = ctypes.c_uint(len(placements))
        if nvml.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            device, info.id, placements, ctypes.byref(count)
        ):
            continue
        filled = placements[: count.value]
        starts = tuple(sorted(entry.start for entry in filled))
        profiles.append(Profile(name, info.slices, filled[0].size, starts, info.sms, info.megabytes))
    if not profiles:
        raise ConfigError(f"{title.value.decode()} has no MIG: name a GPU that has, as in --mig h100")
    return title.value.decode(), tuple(sorted(profiles, key=lambda p: (p.compute, p.memory)))


def differences(card: Card, table: tuple[Profile, ...]) -> list[str]:
    """One line for each thing in which NVML's table is not ours."""
    theirs, lines = {profile.name: profile for profile in table}, []
    for mine in card.profiles:
        other = theirs.pop(mine.name, None)
        if other is None:
            lines.append(f"{mine.name}: not in NVML's table")
            continue
        for what in ("compute", "memory", "starts", "num_sms", "megabytes"):
            ours, by_nvml = getattr(mine, what), getattr(other, what)
            if ours != by_nvml:
                lines.append(f"{mine.name}: {what.replace('num_sms', 'SMs')} {ours}, by NVML {by_nvml}")
    return lines + [f"{name}: in NVML's table only" for name in theirs]
