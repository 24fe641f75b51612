"""Packed layouts of the CUDA products, and the products themselves where there is a GPU."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.encoded_linear import cuda, formats
from quire.quant.encoded import Encoded
from quire.quant.schemes import Packed, named, pack

SCHEMES = (
    "int4-g128", "int4-g64", "int4-g32", "int4-g128z", "int4-g32z", "nf4-b64", "nf4-b64n", "fp4-b64n", "fp4bnb-b64",
    "int8-channel", "int8-1x64", "fp8-channel", "fp8-128x128",
    "gguf-q4_0", "gguf-q4_1", "gguf-q8_0", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k",
)  # fmt: skip
# Zero points become minimums in 16 bits, absmaxes of two levels one 16-bit number.
TOLERANCE = {"int4-g128z": 1e-3, "int4-g32z": 1e-3, "nf4-b64n": 5e-4, "fp4-b64n": 5e-4}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def encoded(name: str, num_rows: int, num_columns: int) -> Encoded:
    scheme = named(name)
    if not name.startswith("gguf-"):
        return Encoded.of(scheme, torch.randn(num_rows, num_columns) * 0.02)
    block, block_bytes = scheme.block, scheme.block_bytes  # type: ignore[attr-defined]
    raw = np.random.default_rng(0).integers(0, 256, (num_rows, num_columns // block, block_bytes), np.uint8)
    blocks = torch.from_numpy(raw)
    for at in scheme._halves:  # type: ignore[attr-defined]
        scales = (torch.rand(num_rows, num_columns // block, 1) * 0.01 + 0.001).half()
        blocks[..., at : at + 2] = scales.view(torch.uint8)
    return Encoded(scheme, {"blocks": blocks}, (num_rows, num_columns))


def columns_for(name: str) -> int:
    """Rows with an odd number of chunks, where the scheme allows it."""
    return 512 if "_k" in name or "128" in name else 576


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_rows_are_the_same_numbers(name: str) -> None:
    weight = encoded(name, 72, columns_for(name))
    packed = formats.pack(name, weight.parts, weight.shape)
    layout = formats.layout(name, *weight.shape)
    assert {key: tuple(part.shape) for key, part in packed.items()} == {
        key: shape for key, (shape, _) in layout.items()
    }
    assert all(packed[key].dtype in dtypes for key, (_, dtypes) in layout.items())
    assert relative(formats.decode(name, packed, weight.shape), weight.decode()) <= TOLERANCE.get(name, 1e-7)


def test_schemes_without_a_product_are_not_served() -> None:
    for name in ("int4-g48", "int8-1x100", "float16", "gguf-q2_k"):
        assert formats.parse(name) is None
    assert not cuda.serves("int4-g128", 128, 128, torch.float32)  # activations have 16 bits


def test_splits_fill_the_processors() -> None:
    assert cuda.best_splits(blocks=132, chunks=64, tile=256, processors=132) == 1
    assert cuda.best_splits(blocks=32, chunks=224, tile=64, processors=132) in range(3, 9)


def test_every_ring_has_a_slot() -> None:
    """Scales in float32 for every 16 or 32 columns make the largest slots."""
    for name in (*SCHEMES, "int4-g32z", "int4-g16z", "int8-1x16", "int8-1x32", "fp8-1x16"):
        kind = formats.parse(name)
        assert kind is not None
        for scales in kind.scales:
            sets = 1 if not kind.group or kind.group > formats.CHUNK else 2
            slot = 8 * 32 * (2 * kind.words + sets * kind.raw_words(scales)) * 4
            assert min(cuda.ring_slots(slot, halved) for halved in (True, False)) >= 1, (name, scales)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_products_agree_with_decoded_rows(name: str, dtype: torch.dtype) -> None:
    weight = encoded(name, 1096, columns_for(name)).to(torch.device("cuda"))
    whole = weight.decode()
    packed = pack(weight, torch.device("cuda"), dtype)
    assert isinstance(packed.scheme, Packed)
    product = cuda.Product(name, packed.parts, packed.shape)
    for tokens in (1, 8, 9, 16, 17, 64, 100, 256, 300, 600):
        x = torch.randn(tokens, weight.shape[1], device="cuda").to(dtype)
        residual = torch.randn(tokens, weight.shape[0], device="cuda").to(dtype)
        out = torch.full_like(residual, torch.nan)
        product.linear(x, out, None, residual)
        assert relative(out, x.float() @ whole.T + residual.float()) < 1e-2
        again = torch.full_like(residual, torch.nan)
        product.linear(x, again, None, residual)
        assert torch.equal(out, again)
        product.linear(x, residual_again := residual.clone(), None, residual_again)
        assert relative(residual_again, x.float() @ whole.T + residual.float()) < 1e-2


def relative(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm())
