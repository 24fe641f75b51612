"""A plan says within 2 % what the engine then allocates."""

import pytest
import torch

from quire.bench.capacity import Device, device_of, find_gpu, floor_of, plan_capacity
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import build
from quire.runner import sizing
from quire.weights.source import open_source
from tests.cli.conftest import write_model

HERE = Device("here", False, None, 10e9, 0.0, "test")


MEMORY = 6 << 30


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """What is free, in a list: between the plan and the engine others may take some of the real, or give it back."""
    free = [MEMORY]
    monkeypatch.setattr(sizing, "available_memory", lambda: free[0])
    return free


VARIANTS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "odd sizes": {"vocab_size": 301, "hidden_size": 96, "intermediate_size": 100, "head_dim": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "tie_word_embeddings": True,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "tie_word_embeddings": True,
        "ffn_dim": 128,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": True,
        "activation_function": "relu",
    },
}


def assert_planned(config: EngineConfig, source, memory: list[int]) -> None:
    planned = plan_capacity(config, source, HERE)
    if config.model.quantization in (
        "none",
        "checkpoint",
    ):  # the others' weights are mapped from a file, and can be dropped
        memory[0] = MEMORY - planned.weights.num_bytes  # as the engine finds it, which sizes the pool last
    built = build(config)
    try:
        report = built.report
        assert planned.weights.num_bytes == pytest.approx(report.start.weights_bytes, rel=0.02)
        assert [(one.part, one.num_bytes) for one in planned.weights.groups] == [
            (one.part, one.num_bytes) for one in report.groups
        ]
        assert planned.pool.num_bytes == pytest.approx(report.pool.num_bytes, rel=0.02)
        assert planned.pool.num_tokens == pytest.approx(report.pool.num_tokens, rel=0.02)
        assert (planned.max_model_len, planned.kv_dtype) == (
            report.limits.max_model_len,
            report.precision.kv_dtype,
        )
        assert planned.max_num_seqs == report.limits.max_num_seqs
    finally:
        built.engine.close()


@pytest.mark.parametrize("quantization", ["int8", "none"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_architecture_is_counted_as_the_engine_keeps_it(tmp_path, variant, quantization, memory):
    folder = str(write_model(tmp_path / "model", **VARIANTS[variant]))
    config = EngineConfig.of(model=folder, load_format="dummy", quantization=quantization, device="cpu")
    assert_planned(config, open_source(folder, load_format="dummy"), memory)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"quantization": "none"},
        {"quantization": "checkpoint"},
        {"quantization": "int8", "kv_cache_memory_bytes": 100 << 20, "kv_cache_dtype": "float32"},
        {"quantization": "int8", "block_size": 1, "num_blocks": 500},
        {"quantization": "int8", "kv_cache_memory_bytes": 100 << 20, "kv_cache_dtype": "int8"},
    ],
)
def test_the_built_in_model_is_counted_as_the_engine_keeps_it(settings, memory):
    assert_planned(EngineConfig.of(device="cpu", **settings), open_source(None), memory)


@pytest.mark.parametrize(("ranks", "words"), [
    ({"pipeline_parallel_size": 2}, "on 2 ranks: stages run on a CPU only so far"),
    ({"tensor_parallel_size": 2, "model": "opt-125m", "load_format": "dummy"}, "OPTForCausalLM cannot be cut"),
])  # fmt: skip
def test_a_plan_of_ranks_is_refused_as_the_engine_refuses_them(ranks, words):
    config = EngineConfig.of(**ranks)
    source = open_source(config.model.model, load_format=config.model.load_format)
    with pytest.raises(ConfigError, match=words):
        plan_capacity(config, source, device_of(find_gpu("h200")))


def test_a_plan_leaves_the_margin_that_the_engine_leaves_on_a_gpu():
    gpu = device_of(find_gpu("l4"))
    planned = plan_capacity(EngineConfig.of(gpu_memory_utilization=1.0), open_source(None), gpu)
    assert planned.weights.num_bytes + planned.pool.num_bytes <= gpu.memory - sizing.GPU_MARGIN


def test_ranks_of_a_machine_share_what_it_has_free():
    source = open_source(None)
    one, *three = (
        plan_capacity(EngineConfig.of(**ranks), source, HERE).pool
        for ranks in ({}, {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 3})
    )
    share = sizing.free_host_bytes() // 3
    assert all(share - pool.block_bytes < pool.num_bytes <= share for pool in three)
    assert three[0].num_blocks == pytest.approx(one.num_blocks, rel=0.01)  # each has a third of a block


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def test_an_8b_model_on_an_h200_has_the_known_floor(tmp_path):
    folder = str(write_model(tmp_path / "model", **LLAMA_8B))
    device = device_of(find_gpu("h200"))
    planned = plan_capacity(EngineConfig.of(model=folder), open_source(folder, load_format="dummy"), device)
    assert planned.weights.num_parameters == 8_030_261_248
    # the input embedding is only gathered
    assert planned.weights.read_bytes == pytest.approx(15.0e9, rel=0.01)
    assert planned.kv_bytes_per_token == 131072
    floor = floor_of(planned, device, context=1, num_sequences=1)
    assert floor.step_seconds == pytest.approx(3.52e-3, rel=0.01)
    assert floor.bound == "memory"
    assert floor_of(planned, device, context=1, num_sequences=4096).bound == "compute"
    assert floor.cost_per_million(3.6) == pytest.approx(0.001 / floor.tokens_per_second * 1e6)


@pytest.mark.parametrize(
    ("quantization", "gigabytes", "embedding", "head"),
    [("int4", 4.65, "int8-channel", "int8-channel"), ("nf4", 4.76, "int8-channel", "int8-channel"),
     ("int8", 8.04, "int8-channel", "int8-channel"), ("fp8", 8.56, "bfloat16", "int8-channel")],
)  # fmt: skip
def test_an_8b_model_is_counted_as_a_gpu_that_is_not_here_keeps_it(
    tmp_path, quantization, gigabytes, embedding, head
):
    folder = str(write_model(tmp_path / "model", **LLAMA_8B))
    config = EngineConfig.of(model=folder, quantization=quantization)
    weights = plan_capacity(
        config, open_source(folder, load_format="dummy"), device_of(find_gpu("h200"))
    ).weights
    assert weights.num_bytes == pytest.approx(gigabytes * 1e9, rel=0.002)
    schemes = {group.part: group.scheme for group in weights.groups}
    assert (schemes["embedding"], schemes["head"]) == (embedding, head)
    assert weights.read_parameters == weights.num_parameters - 128256 * 4096


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_architecture_reads_as_many_weights_in_any_format_of_a_gpu(tmp_path, variant, quantization):
    folder = str(write_model(tmp_path / "model", **VARIANTS[variant]))
    source = open_source(folder, load_format="dummy")
    low, full = (
        plan_capacity(
            EngineConfig.of(model=folder, quantization=name), source, device_of(find_gpu("h200"))
        ).weights
        for name in (quantization, "none")
    )
    assert low.read_parameters == full.read_parameters
    assert low.num_bytes - low.read_bytes <= full.num_bytes - full.read_bytes


def test_planning_takes_no_memory_for_weights(tmp_path):
    folder = str(
        write_model(tmp_path / "model", **{**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192})
    )
    device = Device("cpu", False, 512 << 30, 10e9, 0.0, "test")
    config = EngineConfig.of(model=folder, quantization="int8", device="cpu")
    planned = plan_capacity(config, open_source(folder, load_format="dummy"), device)
    assert planned.weights.num_bytes > 30e9
    assert torch.empty(0).device.type == "cpu"  # "meta" did not stay the default


def test_a_plan_counts_what_layers_with_a_window_keep(tmp_path):
    """Six times as many sequences of 64 windows where five of six layers have one."""
    shape = {"num_hidden_layers": 12, "max_position_embeddings": 8192, "head_dim": 16}
    found = {}
    for name, changes in (
        ("full", {}),
        ("window", {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 128}),
        ("all", {"architectures": ["MistralForCausalLM"], "sliding_window": 128}),
    ):
        write_model(tmp_path / name, **{**shape, **changes})
        config = EngineConfig.of(
            model=str(tmp_path / name),
            load_format="dummy",
            device="cpu",
            kv_cache_memory_bytes=200 << 20,
            max_num_seqs=4096,
        )
        found[name] = plan_capacity(config, open_source(str(tmp_path / name), load_format="dummy"), HERE)
    full, window, all_layers = (found[name].sequences_of(8192) for name in ("full", "window", "all"))
    assert 5 * full < window < 6 * full
    assert all_layers > 50 * full
    assert "are freed behind the window of 128 tokens" in str(found["window"].pool)
    assert found["window"].kv_bytes_read(8192) < 0.2 * found["full"].kv_bytes_read(8192)
    assert found["window"].kv_bytes_per_token == found["full"].kv_bytes_per_token
