"""What plans and simulations count of a mixture: all of its weights, and those that a step reads."""

from pathlib import Path

import pytest
import torch

from quire.kernels import native
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.models.weight_shape import weight_shape
from quire.quant.choice import choose_format
from quire.weights.architectures import SHAPES
from quire.weights.folder import FolderSource
from quire_lab.benchmarks import floors, workloads
from quire_lab.simulate.cost_model import ModelNumbers
from tests.models.checkpoints import VARIANTS, save

native.available()  # compiled before a test moves the cache


@pytest.mark.parametrize(
    ("name", "total", "active"), [("qwen3-30b-a3b", 30.53e9, 3.35e9), ("mixtral-8x7b", 46.70e9, 12.88e9)]
)
def test_published_mixtures_have_the_parameters_they_are_known_by(
    name: str, total: float, active: float
) -> None:
    weights = weight_shape(describe(SHAPES[name]), choose_format("meta", "bfloat16", "none"))
    assert weights.num_parameters == pytest.approx(total, rel=1e-3)
    assert weights.active_parameters == pytest.approx(active, rel=2e-3)
    assert weights.num_bytes == 2 * weights.num_parameters


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe-dense-layers", "olmoe"])
def test_what_is_counted_is_what_is_kept(
    variant: str, quantization: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS[variant]())
    source = FolderSource(tmp_path / "model")
    factory = LayerFactory.of(describe(source.config), quantization=quantization)
    kept = load(source, factory).parameters()
    weights = weight_shape(describe(source.config), factory.number_format)
    assert weights.num_bytes == sum(tensor.nbytes for tensor in kept.values())
    experts = sum(tensor.nbytes for name, tensor in kept.items() if ".experts." in name)
    assert weights.experts is not None
    assert weights.experts.num_bytes == experts > 0
    idle = experts * (1 - weights.experts.top_k / weights.experts.num_experts)
    everything = weights.bytes_read(10**6)
    assert weights.bytes_read(1) == weights.read_bytes == pytest.approx(everything - idle, abs=2)
    assert weights.read_bytes < weights.bytes_read(3) < weights.bytes_read(50) <= everything


def test_the_expected_number_of_experts_is_that_of_random_choices() -> None:
    counted = floors.Counted.of(workloads.SHAPES["qwen3-30b-a3b"])
    torch.manual_seed(0)
    chosen = torch.rand(200, 64, 128).topk(8).indices  # 200 steps of 64 tokens
    drawn = sum(len(step.unique()) for step in chosen) / len(chosen)
    assert counted.num_read_experts(64) == pytest.approx(drawn, rel=0.01)
    assert counted.num_read_experts(1) == pytest.approx(8)
    active = counted.layers + counted.head + 8 * counted.expert
    assert active == pytest.approx(3.35e9 - 151936 * 2048, rel=5e-3)  # embeddings are only gathered
    numbers = ModelNumbers(1, 1, 1, 1, 100, 1, 1, 1, 1, 2, expert_bytes=1280, expert_share=8 / 128)
    assert numbers.bytes_read(1) == pytest.approx(100)
    assert numbers.bytes_read(64) == pytest.approx(100 + 10 * (drawn - 8), rel=0.01)
