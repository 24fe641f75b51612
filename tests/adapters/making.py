"""Random adapters for a model of these tests, without PEFT: quick, and of any shape."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LLAMA_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WIDTHS = {
    "self_attn.q_proj": (48, 48),
    "self_attn.k_proj": (48, 16),
    "self_attn.v_proj": (48, 16),
    "self_attn.o_proj": (48, 48),
    "mlp.gate_proj": (48, 80),
    "mlp.up_proj": (48, 80),
    "mlp.down_proj": (80, 48),
}


def random_tensors(
    seed: int, rank: int, modules: tuple[str, ...] = tuple(WIDTHS), layers: int = 2
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(layers):
        for module in modules:
            num_in, num_out = WIDTHS[module]
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{prefix}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator)
            found[f"{prefix}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator)
    return found


def config(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "bias": "none",
        **changes,
    }


def write(
    folder: Path, seed: int, rank: int, modules: tuple[str, ...] = tuple(WIDTHS), **changes: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config(rank, **changes)))
    save_file(random_tensors(seed, rank, modules), folder / "adapter_model.safetensors")
    return folder


def write_model(folder: Path) -> Path:
    """A model of LLAMA_SHAPE for load_format="dummy"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_SHAPE))
    return folder


class HeldAdapter:
    """An adapter whose config is a pipe: whoever reads it waits, as for a slow disk, until it is let go."""

    def __init__(self, folder: Path) -> None:
        """`folder`: as `write` left it."""
        self._pipe = folder / "adapter_config.json"
        self._text = self._pipe.read_bytes()
        self._pipe.unlink()
        os.mkfifo(self._pipe)
        self._end: int | None = None

    def wait_for_reader(self, seconds: float = 30.0) -> None:
        """Until someone reads it, and waits."""
        deadline = time.monotonic() + seconds
        while self._end is None:
            try:
                self._end = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads
                assert time.monotonic() < deadline, "nobody reads the adapter"
                time.sleep(0.005)

    def let_go(self) -> None:
        """The reader gets what the file would hold, and it is a file from now on."""
        self.wait_for_reader()
        assert self._end is not None
        os.write(self._end, self._text)
        whole = self._pipe.with_name("whole")
        whole.write_bytes(self._text)
        whole.rename(self._pipe)
        self.drop()

    def drop(self) -> None:
        """The reader, if there is one, gets nothing more."""
        if self._end is None and self._pipe.is_fifo():
            with suppress(OSError):
                self._end = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
        if self._end is not None:
            os.close(self._end)
        self._end = None
