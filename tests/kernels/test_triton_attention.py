"""Attention in Triton beyond parity: plans, padding, fixed bits, gathered pages, and fresh prompts."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.attention import cudnn, reference
from tests.kernels.cases import PagedCase, Shape, paged_case, random_case

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these run in the interpreter, on CPU tensors", allow_module_level=True)

from quire.kernels.attention import triton, triton_plan

SHAPE = Shape(num_heads=4, num_kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(2)


def _planner(case: PagedCase, max_rows: int = 8, **settings: object) -> triton.AttentionPlanner:
    _, heads, head_dim = case.q.shape
    return triton.AttentionPlanner(
        max_rows, heads, case.k_pages.shape[2], head_dim, "cpu", max_tokens=64, dtype=case.q.dtype, **settings
    )


def _items(items: torch.Tensor, count: int) -> list[dict[int, int]]:
    return [dict(enumerate(line)) for line in items[:count].tolist()]


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("window", [0, 300])
def test_a_plan_covers_every_visible_key_once_and_no_other(chunk: bool, window: int) -> None:
    contexts, queries = [1, 0, 700, 5000, 64, 129, 40], [1, 1, 1, 1, 1, 1, 40]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    planner = triton.AttentionPlanner(
        7, 4, 2, 32, "cpu", max_tokens=64, max_context=5000, deterministic=chunk
    )
    plan = planner.plan(starts, torch.tensor(contexts, dtype=torch.int32), 7, window=window)
    number = int(plan.totals[0])
    assert number <= plan.decode_items.shape[0]
    for row, context in enumerate(contexts[:6]):
        pieces = [item for item in _items(plan.decode_items, number) if item[triton_plan.ROW] == row]
        seen = [key for item in pieces for key in range(item[triton_plan.BEGIN], item[triton_plan.END])]
        first = max(0, context - window) if window else 0
        assert seen == list(range(seen[0] if seen else 0, context))
        assert not seen or seen[0] <= first
        assert all((item[triton_plan.PIECE] < 0) == (len(pieces) == 1) for item in pieces)
    tiles = _items(plan.prompt_items, int(plan.totals[triton_plan.TOTAL_STRIDE]))
    tokens = [item[triton_plan.TOKEN] + query for item in tiles for query in range(item[triton_plan.COUNT])]
    assert sorted(tokens) == list(range(6, 46))


def test_the_longest_pieces_start_first() -> None:
    contexts = [64, 5000, 200, 900, 64, 2000, 1]
    planner = triton.AttentionPlanner(7, 4, 2, 32, "cpu", max_tokens=64)
    plan = planner.plan(torch.arange(8, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32), 7)
    items = _items(plan.decode_items, int(plan.totals[0]))
    lengths = [item[triton_plan.END] - item[triton_plan.BEGIN] for item in items]
    rows = [item[triton_plan.ROW] for item in items]
    assert rows[0] == 1
    assert set(rows[-3:]) == {0, 4, 6}
    assert max(lengths[len(lengths) // 2 :]) <= max(lengths[: len(lengths) // 2])


@pytest.mark.parametrize(
    ("fused", "dtype"),
    [(True, torch.float32), (False, torch.float32), (True, torch.int8), (False, torch.int8)],
)
def test_one_plan_serves_many_calls_and_lengths_may_change(fused: bool, dtype: torch.dtype) -> None:
    case = random_case(replace(SHAPE, dtype=dtype), [700, 90, 30], [1, 1, 4])
    tuning = triton.AttentionTuning(fused_reduction=fused, decode_tile=64, prompt_tile=32)
    planner = _planner(case, tuning=tuning)
    for shorter in (0, 200):
        case.context_lens[0] -= shorter
        plan = planner.plan(case.query_starts, case.context_lens, 3)
        assert int(plan.row_slots[0, 1]) > 1  # several pieces, or nothing is reduced
        for _ in range(2):
            actual = triton.paged_attention(*case.arguments(), plan=plan, **case.scales)
            torch.testing.assert_close(
                actual, reference.paged_attention(*case.arguments(), **case.scales), rtol=2e-5, atol=2e-5
            )


@pytest.mark.parametrize("fused", [True, False])
def test_pages_that_neighbours_share_are_read_once_for_several_rows(fused: bool) -> None:
    contexts = [700, 690, 640, 610, 900, 330, 320, 40, 700, 650]
    queries = [1] * 9 + [2]
    case = random_case(SHAPE, contexts, queries)
    size = case.k_pages.shape[1]
    for rows, tokens in ((range(1, 4), 600), (range(6, 7), 300), (range(9, 10), 600)):
        for row in rows:  # the last has two queries: it is no decode
            case.block_tables[row, : tokens // size] = case.block_tables[row - 1, : tokens // size]
    planner = _planner(
        case, max_rows=10, tuning=triton.AttentionTuning(decode_tile=32, fused_reduction=fused)
    )
    plan = planner.plan(
        case.query_starts, case.context_lens, 10, block_tables=case.block_tables, block_size=size
    )
    items = _items(plan.decode_items, int(plan.totals[0]))
    together = {(item[triton_plan.ROW], item[triton_plan.COUNT]) for item in items}
    assert {(0, 4), (5, 2)} <= together
    assert all(count == 1 for row, count in together if row not in (0, 5))
    for row, context in enumerate(contexts[:9]):
        seen = [
            key
            for item in items
            if item[triton_plan.ROW] <= row < item[triton_plan.ROW] + item[triton_plan.COUNT]
            for key in range(item[triton_plan.BEGIN], item[triton_plan.END])
        ]
        assert sorted(seen) == list(range(context))
    expected = reference.paged_attention(*case.arguments(), **case.scales)
    for _ in range(2 if fused else 1):  # what is reduced at once must leave its counters as they were
        actual = triton.paged_attention(*case.arguments(), plan=plan, **case.scales)
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("head_dim", "block_size"), [(256, 16), (192, 4), (64, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_wide_heads_and_large_blocks_agree(head_dim: int, block_size: int, deterministic: bool) -> None:
    case = random_case(Shape(2, 1, head_dim, block_size), [130, 40], [1, 20])
    expected = reference.paged_attention(*case.arguments(), **case.scales)
    actual = triton.paged_attention(*case.arguments(), deterministic=deterministic, **case.scales)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_padding_gets_zeros_and_rows_without_queries_nothing() -> None:
    case = random_case(SHAPE, [20, 1, 33], [1, 1, 3])
    case.context_lens[1] = 0
    starts = torch.tensor([0, 1, 2, 5, 5], dtype=torch.int32)  # and a row without queries
    lens = torch.cat((case.context_lens, torch.tensor([9], dtype=torch.int32)))
    tables = torch.cat((case.block_tables, torch.zeros_like(case.block_tables[:1])))
    out = torch.full((5, 128), 7.0)
    triton.paged_attention(case.q, case.k_pages, case.v_pages, starts, lens, tables, case.scale, out=out)
    expected = reference.paged_attention(*case.arguments(), **case.scales)
    expected[1] = 0.0
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


def test_without_prompts_only_decodes_are_written() -> None:
    case = random_case(SHAPE, [20, 33], [1, 3])
    out = torch.full((4, 128), 7.0)
    triton.paged_attention(*case.arguments(), out=out, max_query_len=1, **case.scales)
    torch.testing.assert_close(
        out[0], reference.paged_attention(*case.arguments(), **case.scales)[0], rtol=2e-5, atol=2e-5
    )
    assert (out[1:] == 7.0).all()


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (530, torch.float32), (0, torch.int8)])
def test_deterministic_bits_do_not_depend_on_batch_chunk_or_block_size(
    window: int, dtype: torch.dtype
) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": dtype}
    lengths, content = [600, 150], [torch.randn(600, 8, 16), torch.randn(150, 8, 16)]

    def attend(block_size: int, rows: list[int], chunks: list[int]) -> list[torch.Tensor]:
        keys, values = [content[r][:, :2] for r in rows], [content[r][:, 2:4] for r in rows]
        q = [content[r][-count:, 4:] for r, count in zip(rows, chunks, strict=True)]
        case = paged_case(
            Shape(**heads, block_size=block_size), [lengths[r] for r in rows], chunks, keys, values, q
        )
        return list(
            triton.paged_attention(*case.arguments(window), deterministic=True, **case.scales).split(chunks)
        )

    whole = attend(16, [0], [100])[0]
    for block_size, chunks in ((1, [1, 150]), (128, [33, 1])):
        part = attend(block_size, [0, 1], chunks)[0]
        assert torch.equal(part, whole[-chunks[0] :])


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("rows", [
    [(0, 20), (21, 54)], [(0, 27), (27, 54)], [(0, 54)], [(0, 18), (18, 36), (36, 54)],
])  # fmt: skip
def test_fresh_prompts_need_no_pages(rows: list[tuple[int, int]], padding: int) -> None:
    case = random_case(SHAPE, [20, 1, 33], [20, 1, 33])
    heads = torch.cat((case.q, torch.randn(54, 4, 32)), 1)
    k, v = heads[:, 4:6], heads[:, 6:]
    out = torch.full((54, 128), 7.0)
    spans = [(first, end, end - first + padding) for first, end in rows]
    out = cudnn.contiguous_attention(heads, 4, spans, case.scale, out)
    for first, end in rows:
        table, length = torch.tensor([[0]], dtype=torch.int32), torch.tensor([end - first], dtype=torch.int32)
        expected = reference.paged_attention(
            case.q[first:end], k[None, first:end], v[None, first:end],
            torch.tensor([0, end - first]), length, table, case.scale,
        )  # fmt: skip
        torch.testing.assert_close(out[first:end], expected, rtol=2e-5, atol=2e-5)
    assert rows[0][1] != 20 or (out[20] == 7.0).all()  # nobody's token is left alone


def test_a_plan_for_another_window_or_more_rows_is_refused() -> None:
    case = random_case(SHAPE, [20, 33], [1, 3])
    planner = _planner(case, max_rows=2)
    plan = planner.plan(case.query_starts, case.context_lens, 2)
    with pytest.raises(ValueError, match="window"):
        triton.paged_attention(*case.arguments(8), plan=plan, **case.scales)
    with pytest.raises(ValueError, match="max_rows"):
        planner.plan(case.query_starts, case.context_lens, 3)
    with pytest.raises(ValueError, match="max_context"):
        _planner(case, deterministic=True)


def test_prompts_go_to_a_planned_length_or_none() -> None:
    assert cudnn.stops(8192, 8192) == (4096, 8192)
    assert cudnn.stops(2048, 8192) == ()
    assert cudnn.stops(8192, 2048) == ()  # no prompt is as long
    assert cudnn.stops(100_000, 100_000) == (4096, 8192)  # each costs half a second at start
    lengths = [1, 3600, 3687, 4096, 4097, 7000, 7373, 8192, 9000]
    found = [cudnn.stop_for(length, (4096, 8192)) for length in lengths]
    assert found == [0, 0, 4096, 4096, 0, 0, 8192, 8192, 0]
