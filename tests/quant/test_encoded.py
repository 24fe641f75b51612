"""Encoded rows: errors and bits of every scheme, cuts by rows and columns, and matrices that keep the bytes."""

import pytest
import torch
from torch import Tensor

from quire.core.errors import WeightsError
from quire.quant.choice import choose_format
from quire.quant.codebook import CodeBook
from quire.quant.encoded import Encoded, Plain, join
from quire.quant.encoded_matrix import Checkpoint, EncodedMatrix
from quire.quant.int4 import Int4
from quire.quant.schemes import named

CPU = torch.device("cpu")
MADE = ("int4-g32", "int4-g64z", "int4-g128", "nf4-b64", "nf4-b64n", "fp4-b64n", "fp4bnb-b64", "int8-channel")
MADE += ("int8-1x128", "fp8-channel", "fp8-128x128", "bfloat16")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(weight: Tensor, decoded: Tensor) -> float:
    return float((decoded - weight).norm() / weight.norm())


def test_nf4_is_nearer_to_normal_weights_than_fp4_and_that_than_symmetric_int4() -> None:
    """At blocks of 64. int4 from −7 to 7 is the symmetric one; all 16 values, and a zero point, come closer to NF4."""
    weight = normal(512, 4096)
    errors = {
        name: error(weight, Encoded.of(named(name), weight).decode())
        for name in ("nf4-b64", "nf4-b64n", "fp4-b64", "int4-g64", "int4-g64z")
    }
    symmetric = Int4(64)
    parts = symmetric.encode(weight, steps=7)
    errors["int4-7"] = error(weight, symmetric.decode(parts, (512, 4096)))
    assert errors["nf4-b64"] < errors["fp4-b64"] < errors["int4-7"]
    assert errors["nf4-b64"] < errors["int4-g64"]
    right = {"nf4-b64": 0.0920, "nf4-b64n": 0.0920, "fp4-b64": 0.1056, "int4-7": 0.1078}
    assert errors == pytest.approx(errors | right, abs=5e-4)
    assert errors["int4-g64z"] == pytest.approx(0.091, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("nf4-b64", 4.5), ("nf4-b64n", 4.127), ("fp4-b64n", 4.127), ("int4-g128", 4.125), ("int4-g64", 4.25)],
)
def test_bits_are_counted_from_the_stored_bytes(name: str, bits: float) -> None:
    encoded = Encoded.of(named(name), normal(256, 4096))
    assert encoded.bits == 8 * sum(part.nbytes for part in encoded.parts.values()) / (256 * 4096)
    assert encoded.bits == pytest.approx(bits, abs=5e-4)


@pytest.mark.parametrize("name", MADE)
def test_cuts_and_joins_decode_to_the_same_numbers(name: str) -> None:
    weight = normal(256, 512)
    encoded = Encoded.of(named(name), weight)
    assert named(encoded.scheme.name) == encoded.scheme
    whole = encoded.decode()
    assert error(weight, whole) < 0.15
    top, bottom = encoded.rows(0, 128), encoded.rows(128, 256)
    assert torch.equal(bottom.decode(), whole[128:])
    assert torch.equal(encoded.columns(128, 384).decode(), whole[:, 128:384])
    assert bottom.can_follow(top)
    assert torch.equal(join([top, bottom]).decode(), whole)


def test_decoding_by_tiles_is_the_same_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MADE:
        encoded = Encoded.of(named(name), normal(200, 192 if "128" not in name else 256))
        whole = encoded.scheme.decode(encoded.parts, encoded.shape)
        monkeypatch.setattr("quire.quant.encoded.TILE_WEIGHTS", 2000)
        assert torch.equal(encoded.decode(), whole)


def test_cuts_inside_a_group_and_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"columns 64 to 512.*int4-g128.*multiple of 128"):
        Encoded.of(Int4(128), normal(4, 512)).columns(64, 512)
    with pytest.raises(WeightsError, match=r"rows of 96 columns.*groups of 64"):
        Encoded.empty(CodeBook("nf4"), (4, 96))
    parts = Int4(32).encode(normal(4, 64))
    with pytest.raises(WeightsError, match=r"its packed is uint8 \[4, 32\] where int4-g32 of \[4, 128\] has"):
        Encoded(Int4(32), parts, (4, 128))


def filled(weight: Tensor, quantization: str, pieces: list[int]) -> EncodedMatrix:
    matrix = choose_format(CPU, dtype="float32", quantization=quantization).matrix(*weight.shape)
    assert isinstance(matrix, EncodedMatrix)
    first = 0
    for rows in weight.split(pieces):
        matrix.load_rows(first, rows)
        first += rows.shape[0]
    return matrix


@pytest.mark.parametrize("quantization", ["int4", "nf4", "fp4"])
def test_products_are_those_of_the_decoded_weight(quantization: str) -> None:
    weight, x, bias, residual = normal(96, 128), normal(7, 128, seed=1), normal(96), normal(7, 96)
    matrix = filled(weight, quantization, [64, 32])
    decoded = torch.cat([encoded.decode() for encoded in matrix.encoded])
    assert error(weight, decoded) < 0.12
    right = x @ decoded.T + bias + residual
    torch.testing.assert_close(matrix.linear(x, bias, residual.clone()), right)
    torch.testing.assert_close(matrix.logits(x), x @ decoded.T)
    gate, up = (x @ decoded.T).chunk(2, dim=1)
    torch.testing.assert_close(matrix.linear_silu_mul(x, None), torch.nn.functional.silu(gate) * up)
    twin = choose_format(CPU, dtype="float32", quantization=quantization).matrix(96, 128)
    twin.adopt(matrix.state())
    assert torch.equal(twin.linear(x, None, None), matrix.linear(x, None, None))
    kept = matrix.state()
    assert all(twin.state()[name].data_ptr() == tensor.data_ptr() for name, tensor in kept.items())


def test_fused_parts_of_one_scheme_become_one_and_others_stay_apart() -> None:
    weight = normal(96, 128)
    assert len(filled(weight, "int4", [32, 64]).encoded) == 1
    mixed = Checkpoint(torch.float32, CPU, exact=True).matrix(96, 128)
    assert isinstance(mixed, EncodedMatrix)
    mixed.load(64, weight[64:])
    mixed.load(0, Encoded.of(Int4(32), weight[:32]))
    mixed.load(32, Encoded.of(Int4(32), weight[32:64]))
    assert [str(encoded.scheme) for encoded in mixed.encoded] == ["int4-g32", "float32"]
    x = normal(3, 128, seed=2)
    torch.testing.assert_close(mixed.linear(x, None, None)[:, 64:], x @ weight[64:].T)
    twin = Checkpoint(torch.float32, CPU, exact=True).matrix(96, 128)
    twin.adopt(mixed.state())
    assert torch.equal(twin.linear(x, None, None), mixed.linear(x, None, None))


def test_columns_in_another_order_are_taken_from_x_in_that_order() -> None:
    weight, order = normal(32, 64), torch.randperm(64, generator=torch.Generator().manual_seed(3))
    scheme = Int4(32, permuted=True)
    parts = Int4(32).encode(weight[:, order]) | {"columns": order.int()}
    encoded = Encoded(scheme, parts, (32, 64))
    assert error(weight, encoded.decode()) < 0.12
    matrix = Checkpoint(torch.float32, CPU, exact=True).matrix(32, 64)
    matrix.load(0, encoded)
    x = normal(5, 64, seed=4)
    torch.testing.assert_close(matrix.linear(x, None, None), x @ encoded.decode().T)


def test_a_format_that_does_not_keep_the_scheme_decodes() -> None:
    weight = normal(32, 64)
    encoded = Encoded.of(Int4(32), weight)
    full = choose_format(CPU, quantization="none").matrix(32, 64)
    full.load(0, encoded)
    assert torch.equal(full.state()["weight"], encoded.decode())
    nf4 = choose_format(CPU, dtype="float32", quantization="nf4").matrix(32, 64)
    nf4.load(0, encoded)
    assert isinstance(nf4, EncodedMatrix)
    assert nf4.encoded[0].scheme == CodeBook("nf4")


def test_rows_that_no_group_divides_stay_precise() -> None:
    matrix = filled(normal(8, 48), "int4", [8])
    assert matrix.encoded[0].scheme == Plain(torch.float32)
    assert matrix.state().keys() == {"weight"}
