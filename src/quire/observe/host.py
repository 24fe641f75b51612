"""The cores, GPUs and cache of this machine, as far as this process may use them, and its other processes."""

import ctypes
import glob
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from uuid import UUID, getnode

PR_SET_PDEATHSIG = 1  # of prctl
MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
START_ON_STDIN = (
    "QUIRE_START_ON_STDIN"  # a server with this variable imports, and starts after a line on stdin
)


def cache_folder() -> Path:
    """`$QUIRE_CACHE`, or `~/.cache/quire`. It may not exist yet."""
    return Path(os.environ.get("QUIRE_CACHE") or "~/.cache/quire").expanduser()


def default_num_threads() -> int:
    """Physical cores that this process may use, by its affinity and its control group."""
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
    cores = {_first_sibling(cpu) for cpu in cpus}
    return max(1, min(len(cores), _cgroup_cpus()))


def _first_sibling(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _cgroup_cpus() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        return 1 << 30


def memory_left(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes that are available without swapping, and the total: of the machine, or of the control group if it has less
    left. Zeros where the system does not say."""
    machine, group = numbers_in(root / "proc/meminfo"), root / "sys/fs/cgroup"
    pairs = [(machine["MemAvailable"] << 10, machine["MemTotal"] << 10)] if "MemAvailable" in machine else []
    with suppress(OSError, ValueError):  # a group without a limit has `max`
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = numbers_in(group / "memory.stat")  # pages of files are dropped when others need memory
        pairs.append((limit - used + stat.get("active_file", 0) + stat.get("inactive_file", 0), limit))
    return min(pairs, default=(0, 0))


def numbers_in(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as /proc has them; none where there is no such file."""
    with suppress(OSError):
        return {k: int(v) for k, v in re.findall(r"^(\w+):?\s+(\d+)", path.read_text(), re.MULTILINE)}
    return {}


def machine_number() -> int:
    """The same in all processes of this machine, and another on others; less than 2^62."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int >> 67
    except (OSError, ValueError):
        return getnode()


def visible_gpus() -> list[str]:
    """The names of the GPUs that CUDA will show, in its order; for a process that does not load CUDA.

    The list is divided at its commas and no name is read: an index, a UUID and a MIG UUID are passed on as they are.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    names = [name.strip() for name in named.split(",")]
    ends = (index for index, name in enumerate(names) if name in ("", "-1"))  # CUDA ignores what follows
    return names[: next(ends, len(names))]


def see_one_gpu(index: int) -> None:
    """From now on this process sees this GPU only. Before CUDA is started."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus()[index]


def mps_percentage(share: float) -> str | None:
    """A share of the SMs as MPS_PERCENTAGE has it; None for all of them, and where no MPS daemon runs."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    if share == 1.0 or not (folder / "control").exists():
        return None
    with suppress(OSError, ValueError):  # a daemon that was killed leaves its pipe
        if process_birth(int((folder / "nvidia-cuda-mps-control.pid").read_text())) is None:
            return None
    return f"{100 * share:g}"


def process_birth(pid: int) -> str | None:
    """When a process started, which tells it from a later one with its pid; None if it is gone, empty without /proc."""
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return ""
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]


def end_with_parent() -> None:
    """In a child before it runs its program: the kernel sends SIGTERM when the parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def python_command(module: str, *arguments: object) -> tuple[str, ...]:
    """Runs the module's `main` in another process, whose imports collect no garbage."""
    run = f"import sys, quire; sys.exit(quire.load_module({module!r}).main())"
    return sys.executable, "-c", run, *map(str, arguments)


def ending(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory, perhaps)" if name == "SIGKILL" else "")
