"""The thread pool: no chunk lost, none run twice, whatever comes after what."""

import pytest
import torch

from quire.kernels import native, registry


@pytest.mark.skipif(not native.available(), reason="no native kernels on this machine")
def test_jobs_of_changing_size_in_quick_succession_never_mix():
    """A worker late for one job must not take a chunk of the next: results would be wrong, or memory freed."""
    kernel = registry.load("int8_linear", "cpu")
    weights = {rows: torch.randn(rows, 64) for rows in (32, 512, 2048)}
    packed = {}
    for rows, weight in weights.items():
        quantized, scales = kernel.quantize(weight)
        packed[rows] = (kernel.pack(quantized), scales, kernel.row_sums(quantized))
    x = torch.randn(3, 64)
    expected = {rows: kernel.linear(x, *packed[rows]) for rows in weights}
    for _ in range(3000):
        for rows in weights:
            assert torch.equal(kernel.linear(x, *packed[rows]), expected[rows])
