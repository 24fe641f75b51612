"""models, env and plan: what they say, as text and as JSON."""

import json
import re
from pathlib import Path

import pytest

from quire.bench.capacity import GPUS, find_gpu
from quire.weights.architectures import KNOWN, TEXT_PARTS
from quire.weights.builtin import BUILTIN_NAME


def test_models_of_an_empty_cache(run, empty_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(empty_cache / "hub"))
    ran = run("models")
    assert ran.code == 0
    assert f"nothing is cached in {empty_cache}" in ran.out
    assert f"the built-in model, {BUILTIN_NAME}, is fetched (98.4 MB) when it is first used" in ran.out


def test_models_lists_what_lies_in_the_cache(run, empty_cache):
    (empty_cache / "models").mkdir()
    (empty_cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"x" * 5000)
    ran = run("models")
    assert f"{BUILTIN_NAME} (built-in)  5 kB" in ran.out
    found = json.loads(run("models", "--json").out)
    assert found["cache"] == str(empty_cache)
    assert found["models"][0]["num_bytes"] == 5000


def test_models_lists_every_architecture_with_its_features(run):
    text = run("models", "--known").out
    found = json.loads(run("models", "--known", "--json").out)
    assert [item["architecture"] for item in found["architectures"]] == list(KNOWN)
    assert all(name in text for name in (*KNOWN, *TEXT_PARTS))
    gemma = next(item for item in found["architectures"] if item["architecture"] == "Gemma3ForCausalLM")
    assert (gemma["gguf"], gemma["windows"], gemma["lora"], gemma["task"]) == (
        "gemma3",
        True,
        True,
        "generate",
    )
    assert [item["lora"] for item in found["architectures"]] == [
        known.task == "generate" for known in KNOWN.values()
    ]


def test_env_says_what_a_bug_report_needs(run):
    text = run("env").out
    found = json.loads(run("env", "--json").out)
    for name in ("quire", "python", "torch", "numpy"):
        assert found["versions"][name] in text
    assert {"system", "cpu", "cpu_flags", "usable_cores", "memory_bytes", "gpus"} <= set(found["machine"])
    assert {"native", "forced_reference"} <= set(found["kernels"])
    assert found["places"]["cache"] in text


def test_env_does_not_show_secrets(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("QUIRE_ISA", "avx2")
    ran = run("env")
    assert "hf_secret" not in ran.out
    assert "QUIRE_ISA" in ran.out


def test_plan_needs_only_config_json(run, tiny):
    found = json.loads(
        run("plan", tiny, "--gpu", "h200", "--price-per-hour", "3", "--context", "128", "--json").out
    )
    # 2 layers, k and v, 2 heads of 16, in the checkpoint's float32
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert found["weights"]["num_bytes"] == 4 * found["weights"]["num_parameters"]
    assert found["sequences"] == 1024
    first = found["floors"][0]
    assert first["sequences"] == 1
    assert first["cost_per_million_tokens"] == pytest.approx(3 / 3600 * first["seconds_per_token"] * 1e6)


def test_plan_as_text_says_what_fits_and_why(run, tiny):
    text = run("plan", tiny, "--memory", "4GiB", "--bandwidth", "100", "--context", "128").out
    assert "a GPU with 4.29 GB (as given)" in text
    assert "1,024 sequences of 128 (limited by max_num_seqs=1024)" in text
    assert "at best, from 100 GB/s, with 128 tokens each" in text


def test_plan_says_how_many_experts_stay(run):
    experts = ("plan", "qwen3-30b-a3b", "--load-format", "dummy")
    on_gpu = run(*experts, "--gpu", "h100", "--cpu-offload-gb", "20").out
    assert (
        "80 of 128 in each of 48 layers stay, the most used; 21.7 GB of others in pinned host memory"
        in on_gpu
    )
    flags = ("--device", "cpu", "--memory", "20", "--weights-memory-gb")
    assert json.loads(run(*experts, *flags, "8", "--json").out)["num_resident_experts"] == 27
    assert "whole layers of this model stream" in run(*experts, *flags, "1").error


def test_plan_gives_bits_by_parts_and_what_stayed_precise(run):
    folder = str(Path(__file__).parents[1] / "data" / "quantized" / "ct-w4a16-asym")
    here = ("plan", folder, "--device", "cpu", "--memory", "1GiB")
    text = run(*here).out
    assert re.search(r"MLP +int4-g128z +4\.1\d bits +\d", text)
    assert "kept precise: embedding (float32), head (bfloat16), norms and biases (float32)" in text
    found = json.loads(run(*here, "--json").out)["weights"]
    assert sum(group["num_bytes"] for group in found["groups"]) == found["num_bytes"]
    attention = found["groups"][0]
    assert attention["bits"] == 8 * attention["num_bytes"] / attention["num_weights"]
    assert "nothing is quantized" in run(*here, "--quantization", "none").out


def test_plan_without_a_bandwidth_has_no_floor(run, tiny):
    assert "give --bandwidth" in run("plan", tiny, "--memory", "8").out


def test_plan_on_this_machine_measures_it(run, tiny):
    found = json.loads(run("plan", tiny, "--device", "cpu", "--json").out)
    assert found["device"]["read_rate"] > 1e8
    assert found["kv_dtype"] in ("float16", "float32")


def test_plan_counts_the_scales_of_an_int8_kv_cache(run, tiny):
    flags = ("plan", tiny, "--memory", "8", "--context", "128", "--kv-cache-dtype")
    assert "a token in int8 with scales" in run(*flags, "int8").out
    int8, half = (json.loads(run(*flags, dtype, "--json").out) for dtype in ("int8", "float16"))
    head_dim = 16
    assert int8["kv_dtype"] == "int8"
    ratio = half["kv_bytes_per_token"] / int8["kv_bytes_per_token"]
    assert ratio == 2 * head_dim / (head_dim + 2)


def test_the_table_of_gpus_says_where_it_is_from(run):
    text = run("plan", "--list-gpus").out
    for gpu in GPUS:
        assert gpu.name in text
        assert gpu.source in text


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("rtx 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("a100 80gb", "A100-80"),
        ("H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("4090", "RTX-4090"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelled(spelled, name):
    assert find_gpu(spelled).name == name
