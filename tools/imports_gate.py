"""The imports gate: what each room from `llm` down may import, as the design's "Rooms" say.

import-linter checks the order of the rooms. This gate checks what it cannot say: that third-party imports are
within an allowed list, that heavy libraries are imported lazily, and that no function imports our own package
(registries and a package's lazy names aside), since such imports are the scars of cycles.

Usage: python tools/imports_gate.py [ROOT]. Prints one line per finding and exits 1 if there is any.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BARE = frozenset({"torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2"})
LAZY = frozenset({"huggingface_hub", "gguf"})
GRAMMAR = frozenset({"llguidance", "xgrammar"})

# Room -> (importable anywhere, importable only inside a function). Rooms above `llm` are free.
ALLOWED: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "core": (frozenset(), frozenset()),
    "observe": (frozenset(), frozenset()),
    "memory": (frozenset({"numpy"}), frozenset()),
    "scheduler": (frozenset({"numpy"}), frozenset()),
    "llm": (BARE | {"tqdm"}, LAZY),
    "grammar": (BARE, LAZY | GRAMMAR),
    **dict.fromkeys(("engine", "text", "runner", "speculate", "sampling", "models", "layers"), (BARE, LAZY)),
    **dict.fromkeys(("adapters", "quant", "weights", "parallel", "kernels"), (BARE, LAZY)),
}
# Files whose functions may import our own package: lazy public names, tables of alternatives and of commands.
OWN_LAZY_FILES = ("__init__.py", "registry.py", "cli/main.py")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module and where."""

    module: str
    line: int
    in_function: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def imports_of(node: ast.AST, in_function: bool = False) -> Iterator[Import]:
    """Every import below `node`, except imports that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            # A relative import is our own package's.
            yield Import("quire" if child.level else child.module or "", child.lineno, in_function)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from imports_of(other, in_function)
        else:
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(child, inside)


def complaint(room: str, name: str, imported: Import) -> str | None:
    """What is wrong with one import, or None."""
    package = imported.package
    if package == "quire":
        if imported.in_function and not name.endswith(OWN_LAZY_FILES):
            return f"imports {imported.module} inside a function: import it at the top, or break the cycle"
        return None
    if package in sys.stdlib_module_names or room not in ALLOWED:
        return None
    anywhere, lazily = ALLOWED[room]
    if package in anywhere or (package in lazily and imported.in_function):
        return None
    if package in lazily:
        return f"imports {package} at the top: import it inside the function that needs it"
    allowed = ", ".join(sorted(anywhere | lazily)) or "the standard library only"
    return f"imports {package}; room {room} may use {allowed}: move it up, or take a callback"


def findings(root: Path) -> list[str]:
    """Every import under `root` that the design does not allow, one line each."""
    lines = []
    package = root / "src" / "quire"
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0]
        name = path.relative_to(root).as_posix()
        for item in imports_of(ast.parse(path.read_text(encoding="utf-8"), filename=name)):
            problem = complaint(room, name, item)
            if problem:
                lines.append(f"{name}:{item.line}: {problem}")
    return lines


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    lines = findings(root)
    for line in lines:
        print(line)
    print(f"imports gate: {len(lines)} not allowed" if lines else "imports gate: ok")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
