"""The budget gate: the core path, some parts and the whole package stay below fixed numbers of lines.

The core path is what every request runs through between admission and the model: the records of a request and a step,
`memory`, `scheduler`, `engine` without `engine/build`, and `runner`. Features that hook into it and that a request may
leave out (FEATURES) have rooms' files of their own and do not count.

Usage: python tools/budget_gate.py core|parts|total [ROOT]. Prints the numbers and exits 1 above a limit.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

MAX_CORE_LINES = 7_000
MAX_LINES = 77_700
MAX_FILES = 500

CORE_FILES = ("core/request.py", "core/step.py")
CORE_FOLDERS = ("memory", "scheduler", "engine", "runner")
FEATURES = {
    "building an engine": ("engine/build", "engine/policies.py"),
    "LoRA adapters": (
        "memory/adapter_pages.py",
        "scheduler/adapter_admission.py",
        "engine/adapters.py",
        "runner/adapters.py",
    ),
    "speculative decoding": (
        "scheduler/drafts.py",
        "engine/draft_model.py",
        "engine/speculation.py",
        "runner/drafts.py",
    ),
    "encoders": ("engine/encoder.py",),
    "encoder-decoder models": ("memory/cross.py", "runner/cross.py", "runner/cross_cuda.py"),
    "ranks": ("runner/ranked.py",),
    "prefill hand-over": ("engine/prefill.py",),
}
# Parts that have a limit of their own: files and folders. Models behind one port and shares of GPUs are no replicas.
PARTS = {
    "ranks": (1_000, ("parallel", "runner/ranked.py", "engine/build/peer.py")),
    "replicas": (
        1_300,
        ("fleet/__init__.py", "fleet/load.py", "fleet/places.py", "fleet/policies.py", "fleet/prefixes.py")
        + (
            "fleet/proxy.py",
            "fleet/ray_cluster.py",
            "fleet/replicas.py",
            "fleet/router.py",
            "fleet/servers.py",
        ),
    ),
}


def core_path(package: Path) -> list[Path]:
    """The files of the core path, in a stable order."""
    left_out = {package / name for names in FEATURES.values() for name in names}
    paths = [package / name for name in CORE_FILES]
    for folder in CORE_FOLDERS:
        paths += sorted((package / folder).rglob("*.py"))
    return [path for path in paths if path.exists() and left_out.isdisjoint((path, path.parent))]


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def core_budget(package: Path) -> int:
    paths = core_path(package)
    lines = num_lines(paths)
    print(f"core path: {lines:,} lines in {len(paths)} files (at most {MAX_CORE_LINES:,} lines)")
    if lines <= MAX_CORE_LINES:
        return 0
    rooms: dict[str, int] = {}
    for path in paths:
        room = path.relative_to(package).parts[0]
        rooms[room] = rooms.get(room, 0) + num_lines([path])
    print("  " + ", ".join(f"{room} {count:,}" for room, count in rooms.items()))
    return 1


def parts_budget(package: Path) -> int:
    exceeded = 0
    for part, (limit, names) in PARTS.items():
        files = [path for name in names for path in sorted({package / name, *(package / name).glob("*.py")})]
        lines = num_lines(path for path in files if path.is_file())
        print(f"{part}: {lines:,} lines (at most {limit:,})")
        exceeded += lines > limit
    return int(exceeded > 0)


def total_budget(package: Path) -> int:
    paths = sorted(package.rglob("*.py"))
    lines = num_lines(paths)
    print(
        f"src/quire: {lines:,} lines in {len(paths)} files (at most {MAX_LINES:,} lines in {MAX_FILES} files)"
    )
    return 0 if lines <= MAX_LINES and len(paths) <= MAX_FILES else 1


GATES = {"core": core_budget, "parts": parts_budget, "total": total_budget}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in GATES:
        print("usage: python tools/budget_gate.py core|parts|total [ROOT]")
        return 2
    root = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).resolve().parents[1]
    return GATES[arguments[0]](root / "src" / "quire")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
