"""`quire finetune` trains with progress and one-line errors; `quire plan --train` has ZeRO's own numbers."""

import json
import math

import gguf
import pytest
import torch

from quire.cli import finetune
from tests.train.conftest import make_model
from tests.weights.gguf_writing import LLAMA_KEYS, write

LAYER = {  # of LLAMA_KEYS: one, and a vocabulary of 10
    "token_embd.weight": torch.ones(10, 32),
    "output_norm.weight": torch.ones(32),
    "blk.0.attn_norm.weight": torch.ones(32),
    "blk.0.ffn_norm.weight": torch.ones(32),
    "blk.0.attn_q.weight": torch.ones(32, 32),
    "blk.0.attn_k.weight": torch.ones(16, 32),
    "blk.0.attn_v.weight": torch.ones(16, 32),
    "blk.0.attn_output.weight": torch.ones(32, 32),
    "blk.0.ffn_gate.weight": torch.ones(64, 32),
    "blk.0.ffn_up.weight": torch.ones(64, 32),
    "blk.0.ffn_down.weight": torch.ones(32, 64),
}


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(8))
    )
    return path


def test_an_adapter_is_trained_and_the_way_to_serve_it_is_shown(run, data, tmp_path):
    model, output = make_model(tmp_path / "tiny"), tmp_path / "mine"
    flags = (
        "--epochs",
        "1",
        "--batch-size",
        "4",
        "--rank",
        "2",
        "--num-threads",
        "1",
        "--target-modules",
        "q_proj",
    )
    ran = run("finetune", str(data), "--model", str(model), "--output", str(output), *flags)
    assert ran.code == 0, ran.err
    assert "7 examples to train, 1 held out" in ran.err
    assert "step 2/2  loss" in ran.err
    assert f"quire serve {model} --lora-modules mine={output}" in ran.err
    assert json.loads((output / "adapter_config.json").read_text())["r"] == 2
    assert json.loads((output / "training" / "result.json").read_text())["status"] == "finished"
    again = run("finetune", str(data), "--model", str(model), "--output", str(output))
    assert again.code == 2
    assert "holds a finished adapter: give another --output, or --overwrite" in again.err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--nice", "-1", "--nice -1 cannot work: give 0 to 19"),
        ("--nice", "20", "--nice 20 cannot work: give 0 to 19"),
        ("--num-threads", "0", "--num-threads=0 must be a whole number of at least 1"),
        ("--ranks", "0", "--ranks=0 must be a whole number of at least 1"),
        (
            "--output",
            "data.jsonl",
            "--output data.jsonl: data.jsonl is no folder that can be written: choose another",
        ),
        ("--output", "data.jsonl/mine", "data.jsonl is no folder that can be written: choose another"),
    ],
)
def test_what_cannot_be_given_is_one_line_before_anything_is_read(
    flag, value, said, run, data, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ran = run("finetune", "data.jsonl", "--model", "nowhere", flag, value)
    assert ran.code == 2
    assert said in ran.error


def test_a_run_that_begins_again_leaves_other_files_of_the_folder(run, data, tmp_path):
    """--output may be a folder of the user's own, even the one with the data."""
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "notes.txt").write_text("mine")
    model = make_model(tmp_path / "tiny")
    words = ["--epochs", "1", "--batch-size", "8", "--rank", "2", "--num-threads", "1", "--overwrite"]
    ran = run("finetune", data, "--model", model, "--output", tmp_path, *words)
    assert ran.code == 0, ran.err
    assert (tmp_path / "adapter_model.safetensors").stat().st_size > 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_bad_data_is_one_line_and_the_reason_is_kept(run, data, tmp_path):
    model = make_model(tmp_path / "tiny")
    with data.open("a") as file:
        file.write("{\n")
    ran = run("finetune", str(data), "--model", str(model), "--output", str(tmp_path / "mine"))
    assert ran.code == 2
    assert "data.jsonl: 1 of 9 lines cannot be trained: line 9 is no JSON" in ran.err
    assert "line 9" in json.loads((tmp_path / "mine" / "training" / "result.json").read_text())["error"]


def test_a_run_of_low_priority_ends_with_a_checkpoint_when_memory_is_short(run, data, tmp_path, monkeypatch):
    readings = [8 << 30, 8 << 30, 100 << 20]  # before each step; of 16 GiB
    monkeypatch.setattr(finetune, "memory_left", lambda: (readings.pop(0), 16 << 30))
    monkeypatch.setattr(
        finetune, "OOM_SCORE", tmp_path / "oom_score_adj"
    )  # of this process: it cannot be lowered
    monkeypatch.setattr(finetune.os, "nice", lambda steps: None)
    output = tmp_path / "mine"
    model = make_model(tmp_path / "tiny")
    words = ["finetune", data, "--model", model, "--output", output, "--num-threads", "1"]
    words += ["--epochs", "2", "--batch-size", "4", "--rank", "2", "--checkpoint-steps", "100"]
    ran = run(*words, "--nice", "19")
    assert ran.code == 130
    assert "memory is short (0.1 of 17.2 GB left): the same command goes on from the last step" in ran.err
    assert (tmp_path / "oom_score_adj").read_text() == "1000"
    result = json.loads((output / "training" / "result.json").read_text())
    assert (result["status"], result["error"]) == ("stopped", "memory is short (0.1 of 17.2 GB left)")
    own = result["memory"] - 2 * int(0.05 * (16 << 30))  # what this process holds
    assert 50 << 20 < own < 8 << 30
    assert [path.name for path in (output / "training" / "checkpoints").iterdir()] == ["step-000002"]
    ran = run(*words)  # at the usual priority it does not look
    assert ran.code == 0, ran.err
    assert "step 3/4" in ran.err
    assert "step 2/4" not in ran.err


def test_a_plan_of_training_has_the_numbers_of_zero(run):
    ran = run("plan", "--train", "--parameters", "7.5e9", "--ranks", "64", "--json")
    stages = json.loads(ran.out)["stages"]
    assert [round(stage["total"] / 1e9, 1) for stage in stages] == [120.0, 31.4, 16.6, 1.9]
    refused = run("plan", "--train", "--parameters", "7.5e9", "--lora-rank", "8")
    assert refused.code == 2
    assert "--lora-rank needs the shapes of a model" in refused.err


@pytest.mark.parametrize("kind", ["Q4_1", None])
def test_a_plan_of_qlora_has_the_bytes_that_finetune_keeps(run, tmp_path, kind):
    """A GGUF file's own blocks, or NF4 of its floats; and no stage 3, which finetune refuses."""
    path = tmp_path / "m.gguf"
    kinds = gguf.GGMLQuantizationType
    write(path, "llama", LLAMA_KEYS, LAYER, kinds[kind] if kind else None)
    flags = ("plan", path, "--train", "--lora-rank", "2", "--ranks", "4", "--qlora")
    ran = run(*flags)
    assert ran.code == 0, ran.err
    assert f"the base in {'gguf-q4_1' if kind else 'NF4'}, 4 ranks" in ran.out
    assert "stage 3 is left out: it divides a base in full precision only" in ran.out
    record = json.loads(run(*flags, "--json").out)
    assert [stage["stage"] for stage in record["stages"]] == [0, 1, 2]
    assert not kind or json.loads(run(*flags[:-1], "--json").out) == record, (
        "in few bits QLoRA is on by itself"
    )
    linear = sum(math.prod(t.shape) for name, t in LAYER.items() if name.startswith("blk") and t.ndim == 2)
    rows, width = LAYER["token_embd.weight"].shape  # in int8, with a scale for each row
    rest = 2 * (record["parameters"] - linear - rows * width) + rows * (width + 4)
    base = linear * (5 if kind else 4.25) / 8 + rest
    assert record["stages"][0]["parameters"] == pytest.approx(base + 4 * record["trained"])


def test_a_plan_of_qlora_has_the_base_that_was_measured(run, tmp_path):
    """Of llama8b's shape on an H200: benchmarks/results/train_gpu.json."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 128256,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--train", "--lora-rank", "16", "--qlora", "--json")
    ran = run("plan", tmp_path, *flags, "--load-format", "dummy")
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert record["stages"][0]["parameters"] - 4 * record["trained"] == pytest.approx(4.759e9, rel=1e-3)


def test_a_plan_of_lora_in_full_precision_has_stage_3(run, tiny):
    ran = run("plan", tiny, "--train", "--lora-rank", "2", "--ranks", "4")
    assert "the base in bfloat16, 4 ranks" in ran.out
    assert "\n3  " in ran.out
    assert "left out" not in ran.out
