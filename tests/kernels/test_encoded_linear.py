"""Products by encoded rows on the CPU: every scheme against its decoded weight, alone and in batches, on every set."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.kernels import choose, native
from quire.kernels.native import Tape
from quire.quant.encoded import Encoded
from quire.quant.schemes import named, pack

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler")

CPU = torch.device("cpu")
BLOCKS = ("gguf-q4_0", "gguf-q4_1", "gguf-q8_0", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k")
MADE = ("int4-g32", "int4-g64z", "int4-g128", "int4-g128z", "nf4-b64", "nf4-b64n", "fp4-b64n", "fp4bnb-b64")
MADE += ("int8-channel", "int8-1x128", "int8-128x128")
# the last two: more than the 64 steps that are rounded at a time, with and without a remainder of four
SHAPES = ((48, 512), (37, 1536), (160, 768), (37, 2144), (37, 2304))
SHAPED = [(name, shape) for name in BLOCKS + MADE for shape in SHAPES if named(name).fits(shape[1])]
HALVES = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


@pytest.fixture(autouse=True)
def best_set() -> Iterator[None]:
    yield
    native.select_isa(native.usable_isas()[0])


def random_rows(name: str, num_rows: int, num_columns: int, seed: int = 0) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    scheme = named(name)
    if not name.startswith("gguf"):
        return Encoded.of(scheme, torch.randn(num_rows, num_columns, generator=generator) * 0.05)
    (size,) = [part.shape for part in scheme.layout(num_rows, num_columns).values()]
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    for at in HALVES[name.removeprefix("gguf-")]:
        scales = torch.rand(*size[:2], 1, generator=generator) * 1e-3
        blocks[..., at : at + 2] = scales.half().view(torch.uint8).view(*size[:2], 2)
    return Encoded(scheme, {"blocks": blocks}, (num_rows, num_columns))


def rounded(x: Tensor) -> Tensor:
    """x as the kernel sees it: int8 by blocks of 32 columns."""
    blocks = x.reshape(x.shape[0], -1, 32)
    absmax = blocks.abs().amax(2, keepdim=True)
    inverse = torch.where(absmax == 0, 0.0, 127 / absmax)
    return (torch.round(blocks * inverse) * (absmax / 127)).view(x.shape)


def rows_of_x(num_rows: int, num_columns: int) -> Tensor:
    """With an outlier column, a row of zeros, and a stride."""
    x = torch.randn(num_rows, num_columns + 5, generator=torch.Generator().manual_seed(1))[:, :num_columns]
    x[:, 3] *= 20
    x[num_rows // 2] = 0
    return x


def packed(name: str, num_rows: int, num_columns: int) -> Encoded:
    return pack(random_rows(name, num_rows, num_columns), CPU, torch.float32)


def product(
    encoded: Encoded, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    out = torch.full((x.shape[0], encoded.shape[0] + 7), 9.0)[:, : encoded.shape[0]]
    scheme = encoded.scheme
    scheme.kernel.Product(scheme.inner.name, encoded.parts, encoded.shape).linear(x, out, bias, residual)  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize(("name", "shape"), SHAPED)
def test_products_are_those_of_the_decoded_weight_on_every_set(name: str, shape: tuple[int, int]) -> None:
    encoded, weight = packed(name, *shape), random_rows(name, *shape).decode()
    torch.testing.assert_close(encoded.decode(), weight, rtol=1e-6, atol=1e-7)
    bias = torch.randn(shape[0])
    for num_rows in (1, 2, 3, 13, 19, 21, 80):  # six at a time: remainders of 1, 2 and 3
        x, residual = rows_of_x(num_rows, shape[1]), torch.randn(num_rows, shape[0] + 3)[:, : shape[0]]
        right = (rounded(x).double() @ weight.double().T + bias + residual).float()
        native.select_isa(native.usable_isas()[0])
        found = product(encoded, x, bias, residual)
        assert float((found - right).abs().max() / right.abs().max()) < 1e-3
        assert float((found - right).norm() / right.norm()) < 1e-4
        for isa in native.usable_isas()[1:] if num_rows < 80 else ():
            native.select_isa(isa)
            assert torch.equal(product(encoded, x, bias, residual), found), isa


@pytest.mark.parametrize("name", BLOCKS + ("int4-g64z", "nf4-b64n"))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    encoded = packed(name, 64, 1536)
    x = rows_of_x(300, 1536)  # more than a tile is unpacked for
    together = product(encoded, x)
    for row in (0, 1, 149, 150, 255, 256, 299):
        assert torch.equal(product(encoded, x[row : row + 1])[0], together[row])
    for num_rows in (4, 5, 16, 17):  # where kernels change
        assert torch.equal(product(encoded, x[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("num_columns", [576, 1536, 2144])
@pytest.mark.parametrize("name", ["gguf-q4_1", "gguf-q8_0", "int4-g32", "nf4-b32", "int8-channel"])
def test_a_row_of_nan_stays_nan_on_every_set(name: str, num_columns: int) -> None:
    """Otherwise the engine would not find logits that are not finite."""
    encoded = packed(name, 48, num_columns)
    x = rows_of_x(20, num_columns)
    x[[0, 7]] = torch.nan
    for isa in native.usable_isas():
        native.select_isa(isa)
        lost = product(encoded, x).isnan()
        assert lost[[0, 7]].all(), isa
        assert lost.sum() == 2 * 48, isa


@pytest.mark.parametrize("name", ["gguf-q4_1", "gguf-q6_k", "int4-g128z", "nf4-b64n"])
def test_gate_and_up_are_fused_with_the_same_numbers(name: str) -> None:
    encoded = packed(name, 96, 768)
    x, bias = rows_of_x(9, 768), torch.randn(96)
    kernel = choose("encoded_linear", CPU)
    fused = kernel.Product(name, encoded.parts, encoded.shape).linear_silu_mul(x, bias)
    right = choose("activation", CPU).silu_mul(product(encoded, x, bias).contiguous())
    assert torch.equal(fused, right)
    odd = packed(name, 48, 768)
    assert kernel.Product(name, odd.parts, odd.shape).linear_silu_mul(x, None) is None


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_gathered_as_the_reference_decodes_them(name: str) -> None:
    encoded, weight = packed(name, 40, 512), random_rows(name, 40, 512).decode()
    ids = torch.tensor([39, 0, -1, 17, 17, 16])
    right = weight[ids] * (ids >= 0)[:, None]
    assert torch.equal(encoded.gather(ids), right)
    assert torch.equal(encoded.gather(ids.int()), right)


@pytest.mark.parametrize("name", BLOCKS + MADE)
def test_bytes_are_within_three_percent_of_the_schemes_own(name: str) -> None:
    stored, kept = random_rows(name, 256, 1536), packed(name, 256, 1536)
    assert kept.num_bytes <= 1.035 * stored.num_bytes


def test_columns_in_another_order_are_taken_from_x_in_that_order() -> None:
    order = torch.randperm(256).int()
    plain = random_rows("int4-g64", 32, 256)
    ordered = Encoded(named("int4-g64p"), {**plain.parts, "columns": order}, plain.shape)
    x = rows_of_x(3, 256)
    found = product(pack(ordered, CPU, torch.float32), x)
    assert torch.equal(found, product(pack(plain, CPU, torch.float32), x[:, order.long()]))


def test_a_tape_replays_products_and_gathers() -> None:
    encoded = packed("gguf-q4_1", 64, 512)
    ids = torch.tensor([3, 5])
    kernel = choose("encoded_linear", CPU)
    weight = kernel.Product("gguf-q4_1", encoded.parts, encoded.shape)
    with Tape() as tape:
        rows = weight.gather(ids)
        out = native.empty(2, 64)
        weight.linear(rows, out, None, None)
    ids.copy_(torch.tensor([60, 1]))
    tape.replay()
    assert torch.equal(out, product(encoded, encoded.gather(torch.tensor([60, 1]))))


def test_rows_that_have_no_product_stay_as_they_are() -> None:
    kernel = choose("encoded_linear", CPU)
    assert not kernel.serves("int4-g16", 16, 64, torch.float32)
    assert not kernel.serves("int8-channel", 16, 72, torch.float32)
    assert not kernel.serves("gguf-q4_1", 16, 64, torch.bfloat16)
    assert pack(random_rows("int8-channel", 16, 72), CPU, torch.float32).scheme.name == "int8-channel"


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_floats_are_multiplied_as_they_are(name: str) -> None:
    """Rows that a checkpoint keeps precise; x is not rounded, and a row does not depend on the others."""
    for num_rows, num_columns in ((37, 75), (64, 512)):
        encoded, weight = (
            packed(name, num_rows, num_columns),
            random_rows(name, num_rows, num_columns).decode(),
        )
        assert torch.equal(encoded.decode(), weight)
        x = rows_of_x(13, num_columns)
        found = product(encoded, x)
        torch.testing.assert_close(found, x @ weight.T, rtol=1e-4, atol=1e-5)
        assert torch.equal(product(encoded, x[6:7])[0], found[6])
        for isa in native.usable_isas()[1:]:
            native.select_isa(isa)
            assert torch.equal(product(encoded, x), found)
        native.select_isa(native.usable_isas()[0])
