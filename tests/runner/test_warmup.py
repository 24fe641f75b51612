"""Kernel warm-up: kernels run on empty rows, beside other work, and a fault in one ends nothing else."""

import threading
from contextlib import nullcontext

import pytest
import torch

from quire.core.config import ModelConfig
from quire.core.layout import BlockLayout
from quire.kernels import registry
from quire.models import registry as models
from quire.runner import cuda, warmup
from quire.runner.device_ops import RunnerLimits
from quire.runner.graphs import decode_sizes, token_counts
from quire.runner.warmup import KernelWarmup, warm_up_attention, warm_up_sampling

CPU = torch.device("cpu")


def _config() -> ModelConfig:
    return models.describe(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        }
    )  # fmt: skip


@pytest.fixture
def by_triton(monkeypatch):
    """The GPU's kernels, in Triton's interpreter; gives the rows of each call that went well."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("this runs in the interpreter, on CPU tensors")
    called = []

    def noted(kernel):
        def run(*args, **named):
            result = kernel(*args, **named)
            called.append(len(args[0]))
            return result

        return run

    for operation, name in (("sample", "sample_rows"), ("attention", "paged_attention")):
        module = registry.load(operation, "triton")
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    for room in (warmup, cuda):
        monkeypatch.setattr(room, "choose", lambda operation, device: registry.load(operation, "triton"))
    return called


def test_sampling_is_warmed_up_by_one_token(by_triton):
    warm_up_sampling(300, CPU)
    assert by_triton == [1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_is_warmed_up_for_every_range_of_rows(by_triton, deterministic):
    limits = RunnerLimits(20, 32, 64, True, torch.float32, deterministic)
    warm_up_attention(_config(), limits, BlockLayout(1, 16, 2, 16, "float32"), CPU)
    assert by_triton == ([] if deterministic else [16, 21])  # one row of padding


def test_where_there_is_nothing_to_compile_nothing_is_done(monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("memory is taken for nothing"))
    warm_up_sampling(300, CPU)
    limits = RunnerLimits(20, 32, 64, True, torch.float32)
    warm_up_attention(_config(), limits, BlockLayout(1, 16, 2, 16, "float32"), CPU)
    assert not hasattr(registry.choose("sample", CPU), "sample_rows")
    assert cuda.attention_planner(_config(), limits, BlockLayout(1, 16, 2, 16, "float32"), CPU) is None


def test_pieces_run_beside_the_start_and_a_fault_stays_inside(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    gate, done = threading.Event(), []

    def fail() -> None:
        raise RuntimeError("no memory")

    def wait() -> None:
        done.append(gate.wait(10))

    begun = KernelWarmup(CPU, fail, wait)
    assert begun.goes_on
    gate.set()
    begun.join()
    assert done == [True]
    assert not begun.goes_on
    assert not KernelWarmup(CPU).goes_on


def test_gemms_are_measured_for_the_sizes_of_graphs():
    assert token_counts(1024, 8192, False) == [*decode_sizes(1024), *range(1152, 2049, 128)]
    assert token_counts(8, 8192, False)[-1] == 1024  # few rows need no larger graphs
    assert {512, 96, 24} <= set(token_counts(64, 512, True))
    assert 1024 not in token_counts(64, 512, True)
