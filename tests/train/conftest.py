"""A tiny random model with a tokenizer of bytes and a chat template."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.checkpoints import LLAMA, save
from tests.server.scripted import byte_tokenizer

VOCAB, END = 257, 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(folder: Path, **changes: object) -> Path:
    config = transformers.LlamaConfig(
        **{**LLAMA, "vocab_size": VOCAB, "eos_token_id": END, "max_position_embeddings": 128, **changes}
    )
    save(folder, config)
    (folder / "tokenizer.json").write_text(byte_tokenizer())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"})
    )
    return folder


@pytest.fixture(autouse=True)
def _same_threads():
    """One thread: these models are too small for more, which wait for each other. A run sets the number too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats whose answer repeats the question's letter."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": 3 * letter}]}
        for letter in "abcdefghijklmnopqrst"
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
