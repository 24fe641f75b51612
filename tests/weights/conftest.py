import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TENSORS = {
    "model.embed_tokens.weight": torch.arange(40, dtype=torch.float32).reshape(10, 4),
    "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
    "lm_head.weight": torch.arange(40, dtype=torch.float16).reshape(10, 4),
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with one safetensors file and everything that describes it."""
    folder = tmp_path / "tiny"
    write_description(folder)
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded_folder(tmp_path: Path) -> Path:
    """The same model in two shards with an index."""
    folder = tmp_path / "tiny-sharded"
    write_description(folder)
    places = {}
    for number, names in enumerate((list(TENSORS)[:2], list(TENSORS)[2:]), start=1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in names}, folder / shard)
        places |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": 248}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_description(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "old"}))
    (folder / "tokenizer.json").write_text("{}")
