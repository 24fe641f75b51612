"""Tensors of checkpoints: adapters as PEFT keeps them, and optimizer states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.adapters.peft import WEIGHTS
from quire.core.config import ADAPTER_CONFIG_FILE
from quire.core.errors import TrainingError
from quire.train.run_files import write_json


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """A folder that PEFT and `--lora-modules` load."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    write_json(folder / ADAPTER_CONFIG_FILE, config)


def load_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except Exception as error:
        raise TrainingError(
            f"{path} cannot be read ({error}): delete its folder, and an earlier one serves"
        ) from error
