"""What training runs on a GPU, in Triton's interpreter: losses and gradients are those of torch's own operations."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from quire.kernels import registry
from quire.kernels.activation import reference
from quire.models.registry import describe
from quire.train.frozen import EncodedWeight, FrozenFormat, store_int8
from quire.train.layers import Fused, fuses
from quire.train.lora import LoraParameters
from quire.train.model import Example, TrainedModel
from quire.weights.source import open_source

CPU = torch.device("cpu")
EXAMPLES = [
    Example(tuple(range(5, 75)), tuple(range(6, 76))),
    Example((7,), (9,)),
    Example(tuple(range(90, 50, -1)), tuple(range(89, 49, -1))),
]
needs_triton = pytest.mark.skipif(
    "triton" not in registry.alternatives("packed_attention"), reason="Triton does not run here"
)


def gradients(tiny, fused: Fused | None) -> tuple[float, torch.Tensor]:
    source = open_source(tiny)
    model = TrainedModel(describe(source.config), FrozenFormat(torch.float32, CPU), CPU, 128)
    model.load(source)
    parameters = LoraParameters(rank=4, alpha=8.0)
    model.adapt(parameters, ["all-linear"])
    for block in model.model.blocks:  # type: ignore[attr-defined]
        block.attention = replace(block.attention, fused=fused)
    with torch.no_grad():  # B begins as zeros, behind which A has no gradient
        parameters.flat += 0.02 * torch.randn(
            parameters.flat.shape, generator=torch.Generator().manual_seed(1)
        )
    grad = parameters.make_grad()
    loss = model.loss(EXAMPLES)
    loss.backward()
    return loss.item(), grad


@needs_triton
def test_fused_rotation_and_attention_give_the_same_gradients(tiny):
    loss, grad = gradients(tiny, None)
    fused = Fused(registry.load("rotary", "triton"), registry.load("packed_attention", "triton"))
    own_loss, own_grad = gradients(tiny, fused)
    assert own_loss == pytest.approx(loss, rel=1e-5)
    assert float((own_grad - grad).norm() / grad.norm()) < 1e-4


def test_the_gradient_of_gated_silu_is_that_of_torch():
    x, grad = torch.randn(5, 12, requires_grad=True), torch.randn(5, 6)
    gate, up = x.chunk(2, dim=-1)
    (F.silu(gate) * up).backward(grad)
    torch.testing.assert_close(reference.silu_mul_backward(grad, x.detach()), x.grad)


@needs_triton
def test_the_kernel_of_gated_silu_has_its_gradient():
    x, grad = torch.randn(3, 2 * 1100), torch.randn(3, 1100)
    kernel = registry.load("activation", "triton")
    torch.testing.assert_close(
        kernel.silu_mul_backward(grad, x), reference.silu_mul_backward(grad, x), rtol=1e-4, atol=1e-5
    )


def test_what_does_not_fit_has_the_attention_of_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fuses(128, torch.bfloat16, CPU)
    assert not fuses(256, torch.bfloat16, CPU)  # Gemma's heads
    assert not fuses(128, torch.float32, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not fuses(128, torch.bfloat16, CPU)


def test_tables_of_qlora_on_a_gpu_are_kept_in_int8():
    weight = torch.randn(40, 64)
    kept = store_int8(weight)
    assert isinstance(kept, EncodedWeight)
    assert kept.num_bytes == 40 * 64 + 40 * 4
    assert float((kept.restore() - weight).norm() / weight.norm()) < 0.01
