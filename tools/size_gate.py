"""The size gate: files stay under 600 lines, functions under 80. Triton kernels aside.

Usage: python tools/size_gate.py [ROOT]. Prints one line per finding and exits 1 if there is any.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
CPP_SUFFIXES = (".cpp", ".cc", ".cu", ".h", ".hpp", ".cuh")


def source_files(root: Path) -> Iterator[Path]:
    """Every Python and C++ file of the project, in a stable order."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py" or path.suffix in CPP_SUFFIXES:
                yield path


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator is triton.jit, called or not: a kernel is one unit and may be long."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Attribute) and target.attr == "jit":
            if isinstance(target.value, ast.Name) and target.value.id == "triton":
                return True
    return False


def long_functions(path: Path, name: str) -> Iterator[str]:
    """One line per Python function that is too long; lines are counted from `def` to its last one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=name)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_triton_kernel(node):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{node.lineno}: function {node.name} has {num_lines} lines (at most "
                f"{MAX_FUNCTION_LINES}): take a thing with a name out of it"
            )


def findings(root: Path) -> list[str]:
    """Everything under `root` that is too long, one line each."""
    lines = []
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            lines.append(
                f"{name}:1: file has {num_lines} lines (at most {MAX_FILE_LINES}): "
                "take a thing with a name out of it"
            )
        if path.suffix == ".py":
            lines.extend(long_functions(path, name))
    return lines


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    lines = findings(root)
    for line in lines:
        print(line)
    num_files = sum(1 for _ in source_files(root))
    print(f"size gate: {num_files} files, {f'{len(lines)} too long' if lines else 'ok'}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
