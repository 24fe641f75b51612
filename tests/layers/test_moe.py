"""A mixture's layer: only chosen experts are read, and a token's bits are its own."""

import mmap
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import choose, native
from quire.layers.factory import LayerFactory
from quire.layers.moe import MixtureNames, MixtureOfExperts, MixtureShape
from quire.layers.parameters import collect, distribute
from quire.quant.choice import choose_format
from quire.quant.experts import make_experts

SHAPE = MixtureShape(num_experts=16, top_k=2, hidden=512, inner=512, shared_inner=0, renormalize=True)
SMALL = MixtureShape(num_experts=9, top_k=3, hidden=80, inner=48, shared_inner=32, renormalize=False)


def layer_of(shape: MixtureShape, quantization: str = "none") -> MixtureOfExperts:
    layer = MixtureOfExperts(LayerFactory(choose_format("cpu", quantization=quantization)), shape)
    generator = torch.Generator().manual_seed(0)
    for loader in layer.loaders("", MixtureNames("mlp.")).values():
        loader(torch.randn(loader.shape, generator=generator) * loader.shape[-1] ** -0.5)
    return layer


class Watched:
    """A layer's weights in memory of their own, whose accessed pages the system counts."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        parameters = collect(layer.layers())
        starts, size = {}, 0
        for name, tensor in parameters.items():
            starts[name] = size
            size += -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size)
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # counted by small pages, and not joined to its neighbours
        self._held = torch.frombuffer(memory, dtype=torch.uint8)
        views = {}
        for name, tensor in parameters.items():
            view = self._held[starts[name] : starts[name] + tensor.nbytes]
            views[name] = view.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        distribute(layer.layers(), views)

    def accessed_by(self, call: Callable[[], object]) -> int:
        """Bytes of pages, the most of several calls: a kernel that watches memory itself (DAMON) clears marks too."""
        counts = []
        for _ in range(8):
            Path("/proc/self/clear_refs").write_text("1")
            call()
            counts.append(self._accessed_bytes())
        return max(counts)

    def _accessed_bytes(self) -> int:
        first, counted, inside = self._held.data_ptr(), 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                start, end = (int(bound, 16) for bound in bounds.groups())
                inside = start < first + self._held.nbytes and end > first
            elif inside and line.startswith("Referenced:"):
                counted += 1024 * int(line.split()[1])
        return counted


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not say which pages are accessed"
)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_only_the_chosen_experts_are_read(quantization: str) -> None:
    layer = layer_of(SHAPE, quantization)
    state = collect(layer.layers())
    experts = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("experts."))
    router = sum(tensor.nbytes for tensor in state.values()) - experts
    expert = experts // SHAPE.num_experts
    watched = Watched(layer)
    x = torch.randn(1, SHAPE.hidden)
    layer(x, x)  # what is found out once, at the first call
    read = watched.accessed_by(lambda: layer(x, x))
    chosen = router + SHAPE.top_k * expert
    assert chosen <= read <= chosen + 16 * mmap.PAGESIZE  # each tensor's last page is not full
    many = torch.randn(200, SHAPE.hidden)
    assert watched.accessed_by(lambda: layer(many, many)) >= router + experts


@pytest.mark.skipif(not native.available(), reason="native kernels promise this, torch does not")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_tokens_bits_do_not_depend_on_the_others(quantization: str) -> None:
    layer = layer_of(SMALL, quantization)
    if quantization == "none":  # the shared expert is a dense layer, whose GEMM in fp32 is torch's
        layer.shared_gate_up = layer.shared_down = None
    x, residual = torch.randn(70, SMALL.hidden), torch.randn(70, SMALL.hidden)
    whole = layer(x, residual.clone())
    for first, last in ((0, 1), (3, 11), (20, 36), (1, 64), (69, 70)):
        assert torch.equal(layer(x[first:last], residual[first:last].clone()), whole[first:last])


@pytest.mark.parametrize("quantization", ["int8", "llm-int8", "int4", "nf4"])
def test_experts_in_other_formats_stay_near_full_precision(quantization: str) -> None:
    """With the same input the router, which stays in floats, chooses the same experts."""
    shape = MixtureShape(6, 2, 128, 128, 64, True)
    x, nothing = torch.randn(40, 128), torch.zeros(40, 128)
    exact, rounded = (layer_of(shape, name)(x, nothing.clone()) for name in ("none", quantization))
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < (0.03 if "int8" in quantization else 0.2)


def test_no_tokens_are_no_tokens() -> None:
    nothing = torch.zeros(0, SMALL.hidden)
    for quantization in ("none", "int8"):
        assert layer_of(SMALL, quantization)(nothing, nothing).shape == (0, SMALL.hidden)


def test_formats_without_a_grouped_gemm_are_refused_on_a_gpu() -> None:
    low = choose_format("cpu", quantization="int4")
    with pytest.raises(ConfigError, match=r"quantization='int4' has no grouped GEMM.*'none'"):
        make_experts(low, choose("moe", "cpu"), torch.device("cuda"), 4, 64, 64)


def test_parameters_come_back_under_their_names() -> None:
    for quantization in ("none", "int8"):
        one, other = layer_of(SMALL, quantization), MixtureOfExperts(
            LayerFactory(choose_format("cpu", quantization=quantization)), SMALL
        )  # fmt: skip
        state: dict[str, Tensor] = collect(one.layers())
        distribute(other.layers(), state)
        x = torch.randn(5, SMALL.hidden)
        assert torch.equal(one(x, x.clone()), other(x, x.clone()))
