"""Which part of a model each rank holds."""

import itertools

import pytest
import torch

from quire.core.config import ModelConfig
from quire.core.errors import ConfigError, WeightsError
from quire.kernels.registry import load
from quire.parallel.cut import cut_model
from quire.quant.encoded import Columns
from quire.quant.int8 import Int8Matrix
from quire.weights.source import cut_weight

BUILTIN = ModelConfig("LlamaForCausalLM", 49152, 576, 30, 9, 3, 64, 1536, 2048)


def _widths(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [last - first for first, last in spans]


def test_the_built_in_model_on_two_ranks_has_6_and_3_heads_and_the_mlp_evens_that_out():
    cut = cut_model(BUILTIN, 0, 2)
    assert (_widths(cut.heads), _widths(cut.kv_heads), _widths(cut.inner)) == ([6, 3], [2, 1], [704, 832])
    weights = [
        2 * 64 * 576 * (heads + kv) + 3 * 576 * inner
        for heads, kv, inner in zip(*map(_widths, (cut.heads, cut.kv_heads, cut.inner)), strict=True)
    ]
    assert max(weights) / min(weights) < 1.05


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 9])
def test_ranks_hold_every_part_once_and_cut_columns_at_multiples_of_64(size):
    cut = cut_model(BUILTIN, 0, size)
    for spans, count in ((cut.heads, 9), (cut.inner, 1536), (cut.vocab, 49152)):
        assert [first for first, _ in spans] == [0, *(last for _, last in spans[:-1])]
        assert spans[-1][1] == count
        assert all(last > first for first, last in spans)
    assert all(first % 64 == 0 for first, _ in cut.inner)
    for (first, last), (kv_first, kv_last) in zip(cut.heads, cut.kv_heads, strict=True):
        assert kv_first * 3 <= first  # three queries share a key-value head
        assert last <= kv_last * 3
        assert (last - first) % (kv_last - kv_first) == 0


def test_more_ranks_than_heads_are_refused_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=10 .* 3 key-value heads × 3 query .* at most 9"
    ):
        cut_model(BUILTIN, 0, 10)


def test_parts_of_tensors_make_up_the_whole():
    whole = torch.arange(960 * 576).view(960, 576)
    rows = [
        cut_weight(cut_model(BUILTIN, r, 2), "model.layers.3.self_attn.qkv_proj.weight", whole)
        for r in (0, 1)
    ]
    assert [part.shape[0] for part in rows] == [640, 320]
    assert torch.equal(
        torch.cat((rows[0][:384], rows[1][:192], rows[0][384:512], rows[1][192:256])), whole[:768]
    )
    output = torch.randn(576, 576)
    columns = [
        cut_weight(cut_model(BUILTIN, r, 2), "model.layers.3.self_attn.o_proj.weight", output) for r in (0, 1)
    ]
    assert torch.equal(torch.cat([part.cut() for part in columns], dim=1), output)
    norm = torch.ones(576)
    assert cut_weight(cut_model(BUILTIN, 1, 2), "model.norm.weight", norm) is norm


def test_int8_refuses_columns_that_are_mixed_with_those_of_another_rank():
    matrix = Int8Matrix(8, 48, torch.device("cpu"))
    with pytest.raises(WeightsError, match=r"columns 0 to 48 .* multiple of 64.*quantization none"):
        matrix.load(0, Columns(torch.randn(8, 96), 0, 48))


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("tokens", "channels", "cuts"), [(1, 576, (384,)), (5, 33, (64, 128)), (40, 64, (448,))]
)
def test_sums_over_parts_have_the_bits_of_the_whole_product(kernel, tokens, channels, cuts):
    operations = load("int8_linear", kernel)
    columns, bounds = 512, (0, *cuts, 512)
    x, bias, residual = torch.randn(tokens, columns), torch.randn(channels), torch.randn(tokens, channels)
    x[0] *= 1e-35  # counts as zero
    q, scales = operations.quantize(torch.randn(channels, columns))
    whole = operations.linear(x, operations.pack(q), scales, operations.row_sums(q), bias, residual)
    spans = list(itertools.pairwise(bounds))
    peaks = torch.stack([operations.row_peaks(x[:, a:b]) for a, b in spans]).amax(0)
    sums = sum(
        operations.partial_linear(
            x[:, a:b], operations.pack(q[:, a:b]), operations.row_sums(q[:, a:b]), peaks
        )
        for a, b in spans
    )
    assert torch.equal(operations.scale_sums(sums, peaks, scales, bias, residual), whole)
