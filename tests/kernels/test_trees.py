"""Token trees: attention sees a node's own path, bit for bit as a decode would; an accepted path moves to its place."""

import random
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.core.draft import ROOT, ancestors, depths
from quire.core.request import Ints, ints
from quire.kernels import registry
from quire.kernels.attention import reference
from quire.kernels.trees import reference as settling
from quire.speculate.tree import accepted_nodes
from tests.kernels.cases import PagedCase, Shape, instruction_set, instruction_sets, paged_case, random_case

IN_INTERPRETER = pytest.mark.skipif(
    "triton" not in registry.alternatives("attention") or torch.cuda.is_available(),
    reason="needs Triton, in its interpreter and on CPU tensors",
)


def random_parents(count: int, seed: int) -> Ints:
    """Depth first: a node hangs on the one before it or on one of its ancestors."""
    chooser, parents, path = random.Random(seed), ints(), [ROOT]
    for node in range(count):
        del path[chooser.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(node)
    return parents


def tree_masks(rows: list[tuple[int, int, Ints]]) -> tuple[Tensor, Tensor, Tensor]:
    """(starts, ancestors, positions) of rows (queries, context, parents), the tree behind all else of its row."""
    starts, seen, positions = [], [], []
    for queries, context, parents in rows:
        base = context - len(parents)
        first = context - queries
        starts += [base if parents else -1] * queries
        seen += [0] * (base - first) + ancestors(parents)
        positions += [*range(first, base), *(base + depth for depth in depths(parents))]
    return (
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seen, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
    )


@pytest.mark.skipif(
    "cpu" not in registry.alternatives("attention"), reason="no native kernels on this machine"
)
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("base", "block_size", "window", "dtype"), [
    (1, 16, 0, torch.float32), (64, 16, 0, torch.float16), (505, 1, 0, torch.float32), (600, 16, 30, torch.float32),
    (64, 16, 0, torch.int8), (505, 1, 0, torch.int8), (600, 16, 30, torch.int8),
])  # fmt: skip
def test_a_node_has_the_bits_of_a_decode(
    isa: str, base: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    from quire.kernels.attention import cpu

    torch.manual_seed(3)
    shape = Shape(6, 2, 24, block_size, dtype)
    parents = random_parents(37, base)
    context = base + len(parents)
    keys, values = torch.randn(2, context, 2, 24)
    q = torch.randn(1 + len(parents), 6, 24) * 2
    case = paged_case(shape, [context, 5], [len(q), 1], [keys, keys[:5]], [values, values[:5]], [q, q[:1]])
    starts, seen, _ = tree_masks([(len(q), context, parents), (1, 5, ints())])
    with instruction_set(isa):
        found = cpu.paged_attention(*case.arguments(window), None, starts, seen, **case.scales)
        for query in (0, 1, 9, 24, 37):
            path = [*range(base), *(base + n for n in range(64) if int(seen[query]) >> n & 1)]
            alone = paged_case(shape, [len(path)], [1], [keys[path]], [values[path]], [q[query : query + 1]])
            assert torch.equal(found[query], cpu.paged_attention(*alone.arguments(window), **alone.scales)[0])
    expected = reference.paged_attention(*case.arguments(window), None, starts, seen, **case.scales)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def _mixed_case(shape: Shape) -> tuple[PagedCase, tuple[Tensor, Tensor, Tensor]]:
    """Trees of two sizes beside a decode, a chunk of a prompt and padding."""
    rows = [(20, 90, random_parents(19, 1)), (1, 30, ints()), (9, 40, ints()), (4, 65, random_parents(3, 2))]
    case = random_case(shape, [context for _, context, _ in rows], [queries for queries, _, _ in rows])
    return case, tree_masks(rows)


@IN_INTERPRETER
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "dtype"), [
    (6, 2, 32, 16, 0, torch.float32), (4, 4, 24, 1, 0, torch.float32), (8, 1, 64, 128, 64, torch.float32),
    (6, 2, 32, 16, 0, torch.int8),
])  # fmt: skip
def test_triton_agrees(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    from quire.kernels.attention import triton

    torch.manual_seed(4)
    case, (starts, seen, positions) = _mixed_case(Shape(heads, kv_heads, head_dim, block_size, dtype))
    actual = triton.paged_attention(*case.arguments(window), None, starts, seen, positions, **case.scales)
    expected = reference.paged_attention(*case.arguments(window), None, starts, seen, **case.scales)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@IN_INTERPRETER
def test_triton_refuses_what_it_would_get_wrong() -> None:
    from quire.kernels.attention import triton

    case, masks = _mixed_case(Shape(4, 2, 32))
    with pytest.raises(ValueError, match="attention over 30 positions has no trees"):
        triton.paged_attention(*case.arguments(30), None, *masks, **case.scales)


@pytest.mark.usefixtures("ordered_dots")
@IN_INTERPRETER
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "base", "dtype"), [
    (6, 2, 32, 16, 0, 59, torch.float32), (2, 2, 24, 1, 0, 506, torch.float32), (8, 1, 64, 128, 20, 700, torch.float32),
    (4, 1, 16, 16, 530, 574, torch.float32), (3, 1, 16, 4, 0, 1, torch.float32), (6, 2, 32, 16, 0, 59, torch.int8),
])  # fmt: skip
def test_with_a_deterministic_plan_a_node_has_the_bits_of_a_decode_and_of_a_chain(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int, base: int, dtype: torch.dtype
) -> None:
    """The tree lies across a border of tiles (64 positions) or of chunks (512), or at the very beginning."""
    from quire.kernels.attention import triton

    torch.manual_seed(5)
    shape = Shape(heads, kv_heads, head_dim, block_size, dtype)
    parents = ints([-1, 0, 1, 2, 3, 4, 5, 2, 7, 8, 9, -1, 11, 0])
    context, count = base + len(parents), 1 + len(parents)
    keys, values = torch.randn(2, context, kv_heads, head_dim)
    q = torch.randn(count, heads, head_dim) * 2
    beside = random_parents(3, 1)  # other rows of the step: another tree, a decode, a chain
    rows = [(count, context, parents), (4, 30, beside), (1, 9, ints()), (5, 40, ints())]
    others = [torch.randn(length, kv_heads, head_dim) for _, length, _ in rows[1:]]
    queries = [torch.randn(number, heads, head_dim) for number, _, _ in rows[1:]]
    case = paged_case(
        shape, [length for _, length, _ in rows], [number for number, _, _ in rows],
        [keys, *others], [values, *others], [q, *queries],
    )  # fmt: skip
    starts, seen, positions = tree_masks(rows)
    found = triton.paged_attention(
        *case.arguments(window), None, starts, seen, positions, deterministic=True, **case.scales
    )
    expected = reference.paged_attention(*case.arguments(window), None, starts, seen, **case.scales)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)

    for leaf in (10, 12):
        nodes = [node for node in range(len(parents)) if int(seen[1 + leaf]) >> node & 1]
        path = [*range(base), *(base + node for node in nodes)]
        asked = [0, *(1 + node for node in nodes)]
        for number in (1, len(asked)):  # the leaf alone, then all of its path as a chain
            alone = paged_case(
                shape, [len(path)], [number], [keys[path]], [values[path]], [q[asked[-number:]]]
            )
            plain = triton.paged_attention(*alone.arguments(window), deterministic=True, **alone.scales)
            assert torch.equal(plain, found[asked[-number:]])


@pytest.mark.parametrize("name", ["reference", *registry.alternatives("trees")])
@pytest.mark.parametrize(("block_size", "position_bytes"), [(1, 12), (4, 8), (16, 3)])
def test_the_accepted_path_moves_to_its_place(name: str, block_size: int, position_bytes: int) -> None:
    module = registry.load("trees", name) if name != "reference" else settling
    check_settling(module, block_size, position_bytes)


def check_settling(module: ModuleType, block_size: int, position_bytes: int) -> None:
    chooser = random.Random(block_size)
    planes, length, counts, bases = 6, 96, [1, 7, 40, 64], [0, 5, 17, 30]
    num_blocks = length // block_size
    tables = torch.randperm(len(counts) * num_blocks).view(len(counts), num_blocks).int()
    scale_planes, scales_offset = 2 * planes, planes * block_size * position_bytes
    shape = (len(counts) * num_blocks, scales_offset + scale_planes * block_size * 2)
    pool = torch.randint(0, 255, shape).to(torch.uint8)
    values = pool[:, :scales_offset].unflatten(1, (planes, block_size, position_bytes))
    scales = pool[:, scales_offset:].unflatten(1, (scale_planes, block_size, 2))
    row_tokens = torch.full((len(counts), length), -5, dtype=torch.int32)
    trees, nodes, chosen = [], torch.full((len(counts), 2, 64), -2, dtype=torch.int32), []
    for row, (count, base) in enumerate(zip(counts, bases, strict=True)):
        parents = random_parents(count, row + 3)
        tokens = [100 + node for node in range(count)]
        trees.append([row, base, len(chosen), count])
        nodes[row, 0, :count], nodes[row, 1, :count] = torch.tensor(tokens), torch.tensor(list(parents))
        for at in range(-1, count):  # mostly some child of the node's
            children = [tokens[n] for n in range(count) if parents[n] == at]
            chosen.append(chooser.choice(children) if children and chooser.random() < 0.9 else 7)
    before = [values.clone(), scales.clone()]
    module.settle(
        torch.tensor(chosen), torch.tensor(trees, dtype=torch.int32), nodes, row_tokens, tables,
        [values, scales],
    )  # fmt: skip
    moved = 0
    for (row, base, first, count), lines in zip(trees, nodes.tolist(), strict=True):
        path = accepted_nodes(lines[0][:count], lines[1][:count], chosen[first : first + 1 + count])
        expected = [chosen[first], *(chosen[first + 1 + node] for node in path)]
        assert row_tokens[row, base : base + len(expected)].tolist() == expected
        for depth, node in enumerate(path):
            moved += depth != node
            source, target = base + node, base + depth
            for after, whole in zip((values, scales), before, strict=True):
                there = after[tables[row, target // block_size].long(), :, target % block_size]
                was = whole[tables[row, source // block_size].long(), :, source % block_size]
                assert torch.equal(there, was)
        for place in range(base):
            at = (tables[row, place // block_size].long(), slice(None), place % block_size)
            assert torch.equal(values[at], before[0][at])
            assert torch.equal(scales[at], before[1][at])
    assert moved
