"""The words gate: plain technical English and names that say something, in `src`.

It refuses mannered words in code, identifiers, comments, docstrings and messages, of C++ too; the variables `found`,
`one` and `place` in functions longer than ten lines; and two public classes of one name in a package.

Usage: python tools/words_gate.py [FOLDER …]. Prints one line per finding and exits 1 if there is any.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MANNERED = re.compile(
    r"(?<![a-z])(whoever|whatever|nobody|somebody|everybody|someone|no one|lest|so many|so much as|those who|those"
    r" that|those whose|anew|company|figures|rehears[a-z]+)(?![a-z])",
    re.IGNORECASE,
)
VAGUE = frozenset({"found", "one", "place"})
LONG_FUNCTION = 10  # lines
NATIVE = frozenset({".cpp", ".cu", ".cuh", ".h"})
PACKAGES = ("src/quire", "src/quire_lab")


def mannered_words(path: Path) -> Iterator[str]:
    """One line per mannered word of a text file."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for match in MANNERED.finditer(line):
            yield f"{path}:{number}: plain words instead of {match.group(0)!r}"


def vague_names(path: Path, tree: ast.Module) -> Iterator[str]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (function.end_lineno or function.lineno) - function.lineno + 1 <= LONG_FUNCTION:
            continue
        names = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        } | {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
        for name in sorted(names & VAGUE):
            yield f"{path}:{function.lineno}: a variable {name!r} in {function.name}: say what it is"


def check(folder: Path) -> Iterator[str]:
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        yield from mannered_words(path)
        yield from vague_names(path, tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(f"{path}:{node.lineno}")
    for path in sorted(path for path in folder.rglob("*") if path.suffix in NATIVE):
        yield from mannered_words(path)
    for name, places in sorted(classes.items()):
        if len(places) > 1:
            yield f"{', '.join(places)}: {len(places)} classes are named {name}"


def main(folders: list[str]) -> int:
    findings = [line for folder in folders or PACKAGES for line in check(Path(folder))]
    print("\n".join(findings) if findings else "words gate: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
