"""Each field of a sequence has one writer: state that two rooms write cannot be checked in either of them."""

import ast
from pathlib import Path

import pytest

import quire
from quire.core.request import Sequence

ROOT = Path(quire.__file__).parent
ROOMS = ("engine", "scheduler", "memory", "speculate")  # that see sequences
NAMES = {
    "sequence",
    "child",
    "parent",
    "leader",
    "follower",
    "beam",
    "s",
}  # of variables that hold a sequence
WRITERS = {
    "scheduler": ("num_computed", "num_pending", "phase", "row", "num_cached", "num_preemptions", "finish_reason",
                  "stop_reason", "has_started", "score"),
    "memory": ("block_ids", "host_block_ids", "block_hashes", "num_indexed"),
}  # fmt: skip


def _written(path: Path) -> set[str]:
    """Fields of sequences that a module assigns, or changes by a method of the list."""
    fields = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in ("append", "extend", "pop", "clear") else None
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        else:
            target = node if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else None
        if (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id in NAMES
        ):
            fields.add(target.attr)
    return fields


@pytest.mark.parametrize("room", WRITERS)
def test_only_one_room_writes_a_field_of_a_sequence(room: str) -> None:
    elsewhere = {
        (str(path.relative_to(ROOT)), name)
        for other in ROOMS
        if other != room
        for path in (ROOT / other).rglob("*.py")
        for name in _written(path) & set(WRITERS[room])
    }
    assert not elsewhere


def test_the_check_sees_the_writers() -> None:
    for room, names in WRITERS.items():
        written = set().union(*(_written(path) for path in (ROOT / room).rglob("*.py")))
        assert set(names) <= written | {"stop_reason"}
        assert set(names) <= set(Sequence.__slots__)
