"""Simulated roundings: alone they are those of the engine's int8, and without any the model is the float32 one."""

from pathlib import Path

import pytest
import torch

from quire.kernels.int8_linear import reference
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from quire_lab.benchmarks.rounding import INT8, everywhere, only_in
from quire_lab.measure.quality import logits_of
from quire_lab.measure.rounding import (
    NONE,
    ROW,
    RoundedFormat,
    hadamard,
    mixed_columns,
    rounded_to_int8,
)
from tests.models.checkpoints import llama, prompts, save


@pytest.mark.parametrize("size", [1, 8, 12, 64, 576, 1536])
def test_hadamard_matrices_are_orthogonal_with_entries_of_one_magnitude(size: int) -> None:
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5))


def test_a_width_that_does_not_divide_a_row_is_the_largest_that_does() -> None:
    rows = torch.randn(3, 40)
    torch.testing.assert_close(mixed_columns(rows, 64), mixed_columns(rows, 8))
    assert torch.equal(rounded_to_int8(rows, 64), rounded_to_int8(rows, ROW))
    error = [float((rounded_to_int8(rows, width) - rows).abs().max()) for width in (ROW, 8)]
    assert 0 < error[1] < error[0] <= float(rows.abs().max()) / 127 / 2 * 1.001


@pytest.mark.parametrize("num_columns", [64, 576])
def test_int8_is_simulated_as_its_kernel_computes_it(num_columns: int) -> None:
    weight, x, residual = torch.randn(48, num_columns), torch.randn(5, num_columns), torch.randn(5, 48)
    matrix = RoundedFormat(everywhere(INT8)).matrix(48, num_columns)
    matrix.load_rows(0, weight)
    quantized, scales = reference.quantize(weight)
    right = reference.linear(x, quantized, scales, reference.row_sums(quantized), None, residual)
    torch.testing.assert_close(matrix.linear(x, None, residual.clone()), right, atol=1e-4, rtol=1e-4)
    exact = RoundedFormat(everywhere(NONE)).matrix(48, num_columns)
    exact.load_rows(0, weight)
    torch.testing.assert_close(exact.logits(x), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_every_part_of_a_model_can_be_rounded_alone(tmp_path: Path) -> None:
    save(tmp_path, llama(hidden_size=128, intermediate_size=256, num_attention_heads=4))
    source = FolderSource(tmp_path)
    config, texts = describe(source.config), prompts(20, 9)

    def logits(rounding_of: object) -> torch.Tensor:
        model = load(source, LayerFactory(RoundedFormat(rounding_of), "cpu"))  # type: ignore[arg-type]
        return torch.cat(logits_of(model, texts, "float32"))

    exact = logits(everywhere(NONE))
    for part in ("q, k, v", "o", "gate, up", "down", "head"):
        assert not torch.allclose(logits(only_in(config, part)), exact, atol=1e-3), part
    assert torch.equal(logits(only_in(config, "no such part")), exact)
