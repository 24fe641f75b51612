"""Number formats: loaded piecewise, close to float, the same bits alone and in a batch, kept without copies."""

from typing import Any

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels import native
from quire.quant import schemes
from quire.quant.choice import check_float8, choose_format, has_float8
from quire.quant.format import Matrix

CPU = torch.device("cpu")


def filled(quantization: str, weight: torch.Tensor, pieces: list[int]) -> Matrix:
    matrix = choose_format(CPU, quantization=quantization).matrix(*weight.shape)
    first = 0
    for rows in weight.split(pieces):
        matrix.load_rows(first, rows)
        first += rows.shape[0]
    return matrix


@pytest.mark.parametrize(("quantization", "tolerance"), [("none", 1e-6), ("int8", 0.02)])
def test_products_are_close_to_float(quantization: str, tolerance: float) -> None:
    torch.manual_seed(0)
    weight, x, bias, residual = (torch.randn(s) for s in ((96, 200), (7, 200), (96,), (7, 96)))
    right = x @ weight.T + bias + residual
    found = filled(quantization, weight, [96]).linear(x, bias, residual)
    assert (found - right).norm() < tolerance * right.norm()
    gate, up = (x @ weight.T + bias).chunk(2, dim=1)
    right = torch.nn.functional.silu(gate) * up
    found = filled(quantization, weight, [96]).linear_silu_mul(x, bias)
    assert (found - right).norm() < 2 * tolerance * right.norm()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loading_piecewise_is_the_same_as_at_once(quantization: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(72, 80).to(dtype)
    whole, parts = (
        filled(quantization, weight, [72]).state(),
        filled(quantization, weight, [40, 3, 29]).state(),
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_int8_rows_have_the_same_bits_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    matrix = filled("int8", torch.randn(48, 176), [48])
    x = torch.randn(65, 176)
    together = matrix.linear(x, None, None)
    for row in range(65):
        assert torch.equal(matrix.linear(x[row : row + 1], None, None)[0], together[row])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_matrix_adopts_what_another_one_kept_without_copying(quantization: str) -> None:
    weight = torch.randn(32, 64)
    kept = filled(quantization, weight, [32])
    twin = choose_format(CPU, quantization=quantization).matrix(32, 64)
    twin.adopt(kept.state())
    assert all(twin.state()[name].data_ptr() == tensor.data_ptr() for name, tensor in kept.state().items())
    wrong = choose_format(CPU, quantization=quantization).matrix(32, 320)
    with pytest.raises(ValueError, match="not torch"):
        wrong.adopt(kept.state())


def test_int8_is_the_default_on_the_cpu_and_a_named_type_means_full_precision() -> None:
    assert choose_format("cpu").name.startswith("int8")
    assert choose_format("cpu", quantization="none", checkpoint_dtype="bfloat16").name == "float32"
    assert choose_format("cpu", dtype="bfloat16").name == "bfloat16"
    assert choose_format("cuda", checkpoint_dtype="bfloat16").name == "bfloat16"


@pytest.mark.parametrize(
    ("isa", "device", "quantized", "chosen"),
    [("avx512", "cpu", "gguf", "checkpoint"), ("amx", "cpu", "gguf", "int8"), ("amx", "cpu", "awq", "checkpoint"),
     ("avx512", "cpu", "", "int8"), ("amx", "meta", "gguf", "checkpoint"), ("amx", "meta", "", "bfloat16")],
)  # fmt: skip
def test_auto_keeps_what_a_checkpoint_has_but_ggufs_blocks_with_amx(
    monkeypatch: pytest.MonkeyPatch, isa: str, device: str, quantized: str, chosen: str
) -> None:
    """On "meta", which stands for a GPU that is not here, too. Small GGUF files do not say that they are quantized."""
    monkeypatch.setattr(native, "isa", lambda: isa)
    monkeypatch.setattr(schemes, "serves_cpu", lambda: True)
    found = choose_format(device, checkpoint_dtype="bfloat16", quantized=quantized)
    assert found.name.startswith(chosen)


@pytest.mark.parametrize(
    ("device", "wrong", "said"),
    [("cpu", {"quantization": "int3"}, "'int3' is not known"),
     ("cpu", {"dtype": "float16", "quantization": "int8"}, "computes in float32"),
     ("cpu", {"quantization": "fp8"}, "needs a GPU"), ("cuda", {"quantization": "llm-int8"}, "on the CPU only"),
     ("cuda", {"quantization": "int4", "deterministic": True}, "no deterministic GEMMs")],
)  # fmt: skip
def test_formats_that_cannot_be_are_refused(device: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_format(device, **wrong)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_float8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_float8(torch.device("cuda")) == (capability >= (8, 9))
    assert not has_float8(torch.device("cpu"))


@pytest.mark.parametrize("setting", ["quantization", "kv_cache_dtype"])
def test_float8_on_a_gpu_that_is_not_here_is_refused_with_its_name(setting: str) -> None:
    asked = {"quantization": "auto", "kv_cache_dtype": "auto", setting: "fp8"}
    check_float8("H100", True, **asked)
    with pytest.raises(ConfigError, match=rf"^A100: {setting}='fp8' needs a GPU .*8\.9.*choose"):
        check_float8("A100", False, **asked)
