"""The budget gate: the core path and the whole package stay below fixed numbers of lines.

The core path is what a request runs through between admission and the model: the records of a request and a step,
`memory`, `scheduler`, `engine` without the modules that build an engine, and `runner`.

Usage: python tools/budget_gate.py core|total [ROOT]. Prints the numbers and exits 1 above a limit.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

MAX_CORE_LINES = 7_000
MAX_LINES = 42_000
MAX_FILES = 350

CORE_FILES = ("core/request.py", "core/step.py", "core/draft.py")
CORE_FOLDERS = ("memory", "scheduler", "runner")
# Modules of `engine` that run once, at start: they read settings, load weights and connect the parts.
BUILDING = frozenset(
    {
        "adapter_build.py",
        "build.py",
        "host_memory.py",
        "offload.py",
        "pins.py",
        "policy_words.py",
        "proposers.py",
        "resolve.py",
        "simulated_adapters.py",
        "simulated_parts.py",
        "vocabulary.py",
    }
)


def core_path(package: Path) -> list[Path]:
    """The files of the core path, in a stable order."""
    paths = [package / name for name in CORE_FILES]
    for folder in CORE_FOLDERS:
        paths += sorted((package / folder).rglob("*.py"))
    paths += [path for path in sorted((package / "engine").glob("*.py")) if path.name not in BUILDING]
    return [path for path in paths if path.exists()]


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


def total_budget(package: Path) -> int:
    paths = sorted(package.rglob("*.py"))
    lines = num_lines(paths)
    print(
        f"src/quire: {lines:,} lines in {len(paths)} files (at most {MAX_LINES:,} lines in {MAX_FILES} files)"
    )
    return 0 if lines <= MAX_LINES and len(paths) <= MAX_FILES else 1


GATES = {"core": core_budget, "total": total_budget}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in GATES:
        print("usage: python tools/budget_gate.py core|total [ROOT]")
        return 2
    root = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).resolve().parents[1]
    return GATES[arguments[0]](root / "src" / "quire")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
