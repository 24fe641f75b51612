"""Bad input from the outside: one clear line that names the value and the remedy, a code that is not 0."""

import fcntl
import json
import os
import struct
from pathlib import Path

import pytest

from tests.cli.conftest import token_prompts, write_model

DUMMY = ("--load-format", "dummy", "--num-blocks", "16", "--quiet")


def generate(run, folder: Path, prompts: list[list[int]], *words: object):
    file = token_prompts(folder.parent / "prompts.jsonl", *prompts)
    return run("generate", folder, "--prompt-file", file, "--json", *DUMMY, *words)


@pytest.mark.parametrize(
    ("prompt", "words", "expected"),
    [
        ([], (), "the prompt is empty: give at least one token"),
        ([5, 300], (), "token id 300 is outside the vocabulary of 300: use 0 to 299"),
        ([-1], (), "token id -1 is outside the vocabulary of 300"),
        ([3] * 128, (), "the prompt has 128 tokens and the context is 128"),
        ([3] * 20, ("--max-model-len", "16"), "the prompt has 20 tokens and the context is 16"),
        ([3], ("--stop-token-id", "999"), "stop_token_ids names token id 999, outside the vocabulary of 300"),
        ([3], ("--stop", "word"), "stop strings need a tokenizer, and this model has none"),
        (
            [3] * 100,
            ("--num-blocks", "2", "--max-num-seqs", "2"),
            "the whole pool has 2: lower max_tokens or n",
        ),
    ],
)
def test_a_prompt_that_cannot_be_served(run, tiny, prompt, words, expected):
    assert expected in generate(run, tiny, [prompt], *words).error


def test_the_other_prompts_are_served(run, tiny):
    ran = generate(run, tiny, [[3, 4], [300], [5]], "--max-tokens", "3", "--ignore-eos")
    assert ran.code == 2
    assert "prompt 2: token id 300" in ran.error
    records = [json.loads(line) for line in ran.out.splitlines()]
    assert [
        len(record["outputs"][0]["token_ids"]) if "outputs" in record else record["error"][:12]
        for record in records
    ] == [3, "token id 300", 3]


def test_a_prompt_in_the_models_place_is_told_its_own(run):
    assert "write --prompt before a prompt" in run("generate", "The capital of France is").error


@pytest.mark.parametrize(
    ("content", "said"),
    [("models: 5", "models is 5: give dict"), ("memory: 16GB", "memory is '16GB': give int")],
)
def test_a_file_of_models_with_a_wrong_type_is_one_line(content, said, run, tmp_path):
    (tmp_path / "models.yaml").write_text(f"{content}\n")
    assert said in run("serve", "--models", tmp_path / "models.yaml").error


def test_a_data_folder_of_another_server_is_refused_before_the_model_is_loaded(run, tmp_path):
    """The model does not exist, and is never looked for."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        error = run("serve", "--data-dir", tmp_path, "--port", "0", tmp_path / "nowhere.gguf").error
        assert f"--data-dir {tmp_path} is in use by another server: give each server a folder" in error
    finally:
        os.close(lock)


def test_a_key_that_is_empty_does_not_leave_a_server_open(run, monkeypatch, tmp_path):
    assert "--api-key is empty" in run("serve", "--api-key", "").error
    (tmp_path / "settings.yaml").write_text("api-key: [one, null]\n")
    assert "--api-key is empty" in run("serve", "--config", str(tmp_path / "settings.yaml")).error
    for nothing in (" ,", ""):
        monkeypatch.setenv("QUIRE_API_KEY", nothing)
        assert "QUIRE_API_KEY holds no key" in run("serve").error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--temperature", "-1"), "error: --temperature=-1.0 is outside [0, 100]"),
        (("--top-p", "0"), "error: --top-p=0.0 is outside (0, 1]"),
        (("--n", "2", "--temperature", "0"), "n=2 with temperature=0 gives the same text 2 times"),
        (
            ("--min-tokens", "9", "--max-tokens", "3"),
            "error: --min-tokens=9 is larger than --max-tokens=3: raise --max-tokens",
        ),
        (("--stop", ""), "error: --stop contains an empty string"),
        (("--logit-bias", "[1]"), "'[1]' is no JSON object"),
        (("--block-size", "0"), "block_size=0 must be a whole number of at least 1"),
        (("--block-size", "4096"), "block_size=4096 is larger than 256"),
        (("--num-blocks", "2", "--max-num-seqs", "4"), "too few for one per sequence with max_num_seqs=4"),
        (("--kv-cache-memory-bytes", "1"), "the pool cannot hold one block"),
        (("--max-model-len", "4096"), "max_model_len=4096 is more than the model's 128 positions"),
        (("--dtype", "float8"), "dtype='float8' is not known: choose one of auto, float32"),
        (
            ("--kv-cache-dtype", "int4"),
            "kv_cache_dtype='int4' is not known: choose one of auto, float32, float16, bfloat16, int8, fp8",
        ),
        (
            ("--kv-cache-dtype", "fp8"),
            "kv_cache_dtype='fp8' needs a GPU that has float8 (compute 8.9 or later): choose int8",
        ),
        (("--device", "cuda"), "no GPU here"),
        (("--system", "brief"), "--system needs a chat template: add --chat"),
        (("--output", "/no/such/folder/x.jsonl"), "--output /no/such/folder/x.jsonl: cannot be written"),
        (("--output", "/"), "--output /: cannot be written"),
        (("--num-blocks", "99999999999"), "lower kv_cache_memory_bytes or num_blocks"),
        (("--scheduling-policy", "fair"), "use --schedule "),
        (("--gpu-memory-utilisation", "1"), "did you mean --gpu-memory-utilization?"),
        (("--max_model_len", "64"), "write --max-model-len "),
    ],
)
def test_a_setting_that_cannot_be(run, tiny, words, expected):
    ran = run("generate", tiny, "--prompt", "x", "--load-format", "dummy", "--quiet", *words)
    assert expected in ran.error


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not known: "),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral' in config.json is not known"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3 key-value heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "x", "--quiet", "--load-format", "dummy"), ("plan",)]
)
def test_a_config_that_cannot_be_served(run, tmp_path, changes, expected, command):
    folder = write_model(tmp_path / "model", **changes)
    assert expected in run(command[0], folder, *command[1:]).error


def broken_models(folder: Path) -> dict[str, Path]:
    no_weights = write_model(folder / "no_weights")
    missing = write_model(folder / "missing_shard")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (missing / "model.safetensors.index.json").write_text(json.dumps(index))
    cut = write_model(folder / "cut_shard")
    header = json.dumps(
        {"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    ).encode()
    (cut / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)
    foreign = folder / "foreign.gguf"
    foreign.write_bytes(b"PK\x03\x04 not a model")
    truncated = folder / "truncated.gguf"
    truncated.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5))
    return {
        "no_weights": no_weights,
        "missing_shard": missing,
        "cut_shard": cut,
        "foreign": foreign,
        "truncated": truncated,
        "nowhere": folder / "nowhere",
        "hub": Path("no-such-owner/no-such-model"),
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("no_weights", "no_weights"),
        ("missing_shard", "model-00001-of-00002.safetensors"),
        ("cut_shard", "model.safetensors"),
        ("foreign", "foreign.gguf"),
        ("truncated", "truncated.gguf"),
        ("nowhere", "no such folder or file: check the path"),
        ("hub", "no-such-owner/no-such-model"),
    ],
)
def test_weights_that_cannot_be_read(run, tmp_path, kind, expected):
    model = broken_models(tmp_path)[kind]
    assert expected in run("generate", model, "--prompt", "x", "--quiet").error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{broken", "prompts.jsonl line 1: is no valid JSON"),
        ('{"text": "x"}', 'write a string or an object with "prompt"'),
        ("\n\n", "holds no prompt"),
    ],
)
def test_a_prompt_file_that_cannot_be_read(run, tiny, text, expected):
    path = tiny.parent / "prompts.jsonl"
    path.write_text(text)
    assert expected in run("generate", tiny, "--prompt-file", path, *DUMMY).error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("throughput", "--num-prompts", "0"), "--num-prompts is 0: give at least 1"),
        (("throughput", "--input-len", "0"), "are 0 and 64: give at least 1"),
        (("throughput", "--lengths", "alpaca", "--input-len", "8"), "give one kind"),
        (("throughput", "--lengths-csv", "nowhere.csv"), "nowhere.csv: cannot be read"),
        (("latency", "--batch-size", "0"), "--batch-size is 0: give at least 1"),
        (("startup", "--iterations", "0"), "--iterations is 0: give at least 1"),
        (("startup", "--block-size", "0"), "block_size=0"),
    ],
)
def test_a_benchmark_that_cannot_be(run, words, expected):
    assert expected in run("bench", *words).error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--gpu", "voodoo2"), "--gpu voodoo2 is not in the table (H200"),
        (("--gpu", "a100"), "--gpu a100 may be A100-80 or A100-40: name one"),
        (("--gpu", "h200", "-q", "llm-int8"), "runs on the CPU only"),
        (("--gpu", "h200", "--context", "0"), "--context is 0: give a number above 0"),
        (("--gpu", "h200", "--context", "999"), "--context 999 is more than the model's 128 tokens"),
        (("--memory", "0.0001"), "the weights take"),
    ],
)
def test_a_plan_that_cannot_be(run, tiny, words, expected):
    assert expected in run("plan", tiny, *words).error
