"""gpt-oss with experts in MXFP4: decoded as transformers does, and refused by name where they do not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.core.errors import ModelError, WeightsError
from quire.layers.factory import LayerFactory
from quire.models.gpt_oss import decode_mxfp4
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from tests.models.checkpoints import gpt_oss, prompts, reference_logits, save
from tests.models.paging import run_chunked


def quantize(folder: Path) -> None:
    """Random numbers in place of the experts of a saved checkpoint, and the same ones as floats in `plain`."""
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors")
    save_file(plain, folder.parent / "plain.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def opened(folder: Path) -> DecoderModel:
    source = FolderSource(folder)
    return load(source, LayerFactory.of(describe(source.config), dtype="float32", quantization="none"))


def test_experts_in_mxfp4_give_the_logits_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference = save(folder, gpt_oss(hidden_size=64, intermediate_size=96))
    quantize(folder)
    reference.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    texts = prompts(19, 33)
    for logits, text in zip(run_chunked(opened(folder), texts, (5, 7), 4), texts, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, text), rtol=1e-4, atol=1e-4)


def test_every_number_of_mxfp4_is_decoded() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.arange(119, 135, dtype=torch.uint8).view(1, 16)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0, :, 0]
    assert torch.equal(decode_mxfp4(blocks, scales)[0], expected)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, gpt_oss(hidden_size=64, intermediate_size=96))
    quantize(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, scales: tensors[scales][:, :-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{scales}.*its shape is"):
        opened(folder)
    save_file({k: v for k, v in tensors.items() if k != scales}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=scales):
        opened(folder)
    with pytest.raises(ModelError, match=r"blocks of 32.*intermediate_size=100"):
        describe({**config, "intermediate_size": 100})
    with pytest.raises(ModelError, match="'other'"):
        describe({**config, "quantization_config": {"quant_method": "other"}})
