"""A command run in this process, and a model so small that it starts at once."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.cli.main import main

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a refused command leaves on stderr, and nothing else."""
        lines = self.err.strip().splitlines()
        assert self.code != 0, "the command was not refused"
        assert len(lines) == 1, f"not one line: {lines}"
        assert "Traceback" not in self.err
        return lines[0]


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def _run(*words: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return _run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with only config.json: served with --load-format dummy, by token ids."""
    return write_model(tmp_path / "tiny")


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def token_prompts(path: Path, *prompts: list[int]) -> Path:
    path.write_text("".join(json.dumps({"prompt_token_ids": one}) + "\n" for one in prompts))
    return path
