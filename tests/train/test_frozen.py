"""Frozen weights that are stored in another form multiply as the matrix does, with the same gradients."""

import pytest
import torch

from quire.quant.encoded import Encoded
from quire.train.frozen import NF4, FrozenFormat, store_nf4

CPU = torch.device("cpu")


def product(matrix, x):
    x = x.clone().requires_grad_()
    y = matrix.linear(x, torch.ones(matrix.num_rows), torch.ones(len(x), matrix.num_rows))
    y.backward(torch.ones_like(y) * torch.arange(matrix.num_rows))
    return y.detach(), x.grad


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_of_a_checkpoint_stay_encoded_where_all_of_them_are(mixed):
    parts = [Encoded.of(NF4, torch.randn(rows, 64)) for rows in (6, 4)]
    whole = torch.cat([part.decode() for part in parts])
    kept = FrozenFormat(torch.float32, CPU, keeps_encoded=True).matrix(10, 64)
    kept.load(6, parts[1])  # in any order
    kept.load(0, parts[0].decode() if mixed else parts[0])
    plain = FrozenFormat(torch.float32, CPU).matrix(10, 64)
    plain.load(0, whole)
    x = torch.randn(3, 64)
    for actual, expected in zip(product(kept, x), product(plain, x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert (kept.kept_bytes < plain.kept_bytes) is not mixed
    assert kept.scheme == NF4.name


def test_rows_that_nf4_cannot_hold_stay_as_they_are():
    matrix = FrozenFormat(torch.float32, CPU, store_nf4).matrix(4, 48)
    matrix.load(0, torch.ones(4, 48))
    assert matrix.kept_bytes == 4 * 48 * 4
    wide = FrozenFormat(torch.float32, CPU, store_nf4).matrix(256, 64)
    wide.load(0, torch.randn(256, 64))
    assert wide.kept_bytes == pytest.approx(256 * 64 * 4.13 / 8, rel=0.02)
