import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.core.errors import ModelError, WeightsError
from quire.weights.folder import FolderSource
from quire.weights.source import DummySource
from tests.weights.conftest import TENSORS


def assert_is_the_model(source: FolderSource) -> None:
    found = dict(source.tensors())
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert source.num_tensors == 3
    assert source.num_bytes == 160 + 8 + 80


def test_one_file_and_shards_hold_the_same_model(model_folder: Path, sharded_folder: Path) -> None:
    for folder in (model_folder, sharded_folder):
        source = FolderSource(folder)
        assert_is_the_model(source)
        assert source.name == folder.name
        assert source.config["hidden_size"] == 4
        assert source.generation_config == {"temperature": 0.6}
        assert source.tokenizer_json() == "{}"
        assert source.tokenizer_config()["eos_token"] == "</s>"
        assert not source.random


def test_a_template_file_wins_over_the_one_in_the_config(model_folder: Path) -> None:
    assert FolderSource(model_folder).tokenizer_config()["chat_template"] == "old"
    (model_folder / "chat_template.jinja").write_text("new")
    assert FolderSource(model_folder).tokenizer_config()["chat_template"] == "new"


def test_what_need_not_be_there_may_be_absent(model_folder: Path) -> None:
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).unlink()
    source = FolderSource(model_folder)
    assert source.generation_config == {}
    assert source.tokenizer_json() is None
    assert source.tokenizer_config() == {}


def test_the_fingerprint_changes_with_the_weights_alone(model_folder: Path) -> None:
    first = FolderSource(model_folder).fingerprint
    (model_folder / "tokenizer.json").write_text("{ }")
    assert FolderSource(model_folder).fingerprint == first
    weights = model_folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert FolderSource(model_folder).fingerprint != first


def test_wide_floats_are_narrowed_and_masks_left_out(model_folder: Path) -> None:
    tensors = {"weight": torch.ones(2, 2, dtype=torch.float64), "mask": torch.ones(2, 2, dtype=torch.bool)}
    save_file(tensors, model_folder / "model.safetensors")
    source = FolderSource(model_folder)
    found = dict(source.tensors())
    assert found.keys() == {"weight"}
    assert found["weight"].dtype == torch.float32
    assert source.num_tensors == 1


def refused(folder: Path, *said: str, error: type[Exception] = WeightsError) -> bool:
    """Whether the folder is refused in one line with all these words."""
    with pytest.raises(error) as caught:
        FolderSource(folder)
    message = str(caught.value)
    return "\n" not in message and all(words in message for words in said)


def test_a_missing_shard_is_named(sharded_folder: Path) -> None:
    (sharded_folder / "model-00002-of-00002.safetensors").unlink()
    assert refused(
        sharded_folder, "shard model-00002-of-00002.safetensors is missing (1 of 2", "fetch it again"
    )


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_cut_shard_is_named(sharded_folder: Path, keep: int) -> None:
    shard = sharded_folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert refused(sharded_folder, shard.name, "cut", "copy it again")


def test_a_shard_that_lacks_a_promised_tensor_is_named(sharded_folder: Path) -> None:
    save_file({"other": torch.ones(2)}, sharded_folder / "model-00002-of-00002.safetensors")
    assert refused(sharded_folder, "model-00002-of-00002.safetensors lacks tensor 'lm_head.weight'")


def test_a_foreign_file_in_the_place_of_weights_is_refused(model_folder: Path) -> None:
    (model_folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refused(model_folder, "model.safetensors is not a safetensors file")


def test_a_folder_without_weights_or_config_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    assert refused(model_folder, "has no model.safetensors", "--load-format dummy")
    (model_folder / "pytorch_model.bin").write_bytes(b"")
    assert refused(model_folder, "pytorch_model.bin", "convert to safetensors")
    (model_folder / "config.json").unlink()
    assert refused(model_folder, "has no config.json")


def test_a_broken_description_is_named(model_folder: Path) -> None:
    (model_folder / "config.json").write_text("{")
    assert refused(model_folder, "config.json is not valid JSON")
    (model_folder / "config.json").write_text("[]")
    assert refused(model_folder, "config.json holds a list")


def test_quantizations_that_are_not_known_are_refused_by_name(model_folder: Path) -> None:
    (model_folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    assert refused(model_folder, "'hqq'", "compressed-tensors, awq, gptq, bitsandbytes", error=ModelError)


def test_a_dummy_needs_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    source = DummySource(tmp_path)
    assert source.random
    assert list(source.tensors()) == []
    assert source.tokenizer_json() is None
    assert source.config == {"hidden_size": 8}
    assert source.fingerprint == DummySource(tmp_path).fingerprint
