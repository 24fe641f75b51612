"""LLM.int8: outliers do not cost the other entries their precision, and a row's bits are its own."""

import pytest
import torch
from torch import Tensor

from quire.quant.choice import choose_format
from quire.quant.format import Matrix
from quire.quant.llm_int8 import Int8OutlierMatrix

CHANNELS = [5, 77, 130, 301, 402, 555]  # six, as large models have them


def matrix_of(weight: Tensor, quantization: str = "llm-int8") -> Matrix:
    matrix = choose_format("cpu", quantization=quantization).matrix(*weight.shape)
    half = weight.shape[0] // 2
    matrix.load_rows(half, weight[half:])
    matrix.load_rows(0, weight[:half])
    return matrix


def vector_wise(x: Tensor, weight: Tensor) -> Tensor:
    """Plain int8: one scale per row of x and of the weight, nothing else."""
    x_scales, scales = (t.abs().amax(1, keepdim=True) / 127 for t in (x, weight))
    return ((x / x_scales).round() @ (weight / scales).round().T) * x_scales * scales.T


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def test_outliers_do_not_cost_the_others_their_precision() -> None:
    weight, x = normal(96, 576), normal(20, 576)
    regular = error(matrix_of(weight).linear(x, None, None), x @ weight.T)
    loud = x.clone()
    loud[:, CHANNELS] *= 64
    right = loud @ weight.T
    matrix = matrix_of(weight)
    assert isinstance(matrix, Int8OutlierMatrix)
    assert error(matrix.linear(loud, None, None), right) < 1.5 * regular
    assert matrix.num_outliers / matrix.num_entries == pytest.approx(6 / 576, rel=0.15)


def test_columns_of_small_weights_keep_16_bits() -> None:
    """The function of the first test, with the weights behind the loud channels divided: int8 steps would lose them."""
    weight, x = normal(96, 576), normal(20, 576)
    right = x @ weight.T
    regular = error(matrix_of(weight).linear(x, None, None), right)
    weight[:, CHANNELS] /= 64
    x[:, CHANNELS] *= 64
    matrix = matrix_of(weight)
    assert error(matrix.linear(x, None, None), right) < 1.2 * regular
    assert error(vector_wise(x, weight), right) > 10 * regular
    twin = choose_format("cpu", quantization="llm-int8").matrix(96, 576)
    twin.adopt(matrix.state())
    assert torch.equal(twin.linear(x, None, None), matrix.linear(x, None, None))


def test_rows_have_the_same_bits_alone_and_in_a_batch_of_80() -> None:
    weight, x = normal(48, 576), normal(80, 576)
    weight[:, CHANNELS[:3]] /= 64
    x[::3, CHANNELS] *= 64  # outliers of some rows only
    matrix = matrix_of(weight)
    bias, residual = normal(48), normal(80, 48)
    together = matrix.linear(x, bias, residual.clone())
    for row in range(80):
        alone = matrix.linear(x[row : row + 1], bias, residual[row : row + 1].clone())
        assert torch.equal(alone[0], together[row])
