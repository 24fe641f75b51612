"""A row's bits depend on its own tokens alone: not on the batch, the chunk, the block size or the threads."""

from collections.abc import Iterator

import pytest
import torch

from quire.kernels import native
from tests.kernels.cases import Shape, instruction_set, instruction_sets, paged_case

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels on this machine")


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.manual_seed(1)
    with instruction_set(request.param):
        yield request.param


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("columns", "channels"), [(576, 96), (130, 45)])
def test_linear_rows_do_not_depend_on_the_batch(columns: int, channels: int) -> None:
    from quire.kernels.int8_linear import cpu

    q, scales = cpu.quantize(torch.randn(channels, columns))
    packed, sums, x = cpu.pack(q), cpu.row_sums(q), torch.randn(70, columns)
    whole = cpu.linear(x, packed, scales, sums)
    for first, last in ((0, 1), (3, 11), (20, 36), (1, 34)):
        assert torch.equal(cpu.linear(x[first:last], packed, scales, sums), whole[first:last])


@pytest.mark.parametrize("width", [32, 21])
def test_instruction_sets_agree_bit_for_bit_on_the_gated_linear(width: int) -> None:
    from quire.kernels.int8_linear import cpu

    q, scales = cpu.quantize(torch.randn(2 * width, 100))
    packed, sums, x = cpu.pack(q), cpu.row_sums(q), torch.randn(20, 100) * 4
    results = []
    for name in instruction_sets():
        with instruction_set(name):
            results += [
                cpu.linear_silu_mul(x, packed, scales, sums),
                cpu.linear_silu_mul(x[:3], packed, scales, sums),
            ]
    assert all(torch.equal(result[:3], results[0][:3]) for result in results)


@pytest.mark.usefixtures("isa")
def test_full_attention_does_not_depend_on_the_neighbours() -> None:
    from quire.kernels.attention import cpu

    lengths = [5, 70, 1, 600]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q, k, v = torch.randn(sum(lengths), 3, 4, 32).unbind(1)
    whole = cpu.full_attention(q, k, v, starts, 0.2).split(lengths)
    for row, pieces in enumerate(zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)):
        alone = cpu.full_attention(*pieces, torch.tensor([0, lengths[row]], dtype=torch.int32), 0.2)
        assert torch.equal(alone, whole[row])


def _attend(
    shape: Shape, lengths: list[int], content: list[torch.Tensor], chunks: list[int], window: int
) -> list[torch.Tensor]:
    """Results of every request's last chunks[r] queries at context lengths[r], computed as one batch."""
    from quire.kernels.attention import cpu

    kv = shape.num_kv_heads
    keys = [c[:n, :kv] for c, n in zip(content, lengths, strict=True)]
    values = [c[:n, kv : 2 * kv] for c, n in zip(content, lengths, strict=True)]
    q = [c[n - count : n, 2 * kv :] for c, n, count in zip(content, lengths, chunks, strict=True)]
    case = paged_case(shape, lengths, chunks, keys, values, q)
    return list(cpu.paged_attention(*case.arguments(window), **case.scales).split(chunks))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("window", [0, 50, 530])
def test_attention_does_not_depend_on_batch_chunk_or_block_size(dtype: torch.dtype, window: int) -> None:
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "dtype": dtype}
    lengths = [600, 150, 37]
    content = [torch.randn(length, 10, 24) for length in lengths]
    alone = [
        _attend(Shape(**heads, block_size=16), [length], [c], [length], window)[0]
        for length, c in zip(lengths, content, strict=True)
    ]
    for block_size, chunks in ((1, [1, 150, 5]), (16, [77, 1, 1]), (128, [3, 2, 37])):
        together = _attend(Shape(**heads, block_size=block_size), lengths, content, chunks, window)
        for result, whole, count in zip(together, alone, chunks, strict=True):
            assert torch.equal(result, whole[-count:])
    early = _attend(Shape(**heads, block_size=16), [520], [content[0]], [1], window)[0]
    assert torch.equal(early, alone[0][519:520])


@pytest.mark.usefixtures("isa")
def test_threads_do_not_change_results() -> None:
    shape = Shape(4, 2, 32)
    content = [torch.randn(700, 8, 32), torch.randn(90, 8, 32)]
    before = native.num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            results.append(torch.cat(_attend(shape, [700, 90], content, [40, 1], 0)))
    finally:
        native.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
