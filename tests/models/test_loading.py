"""Loading: what is missing or wrong is named; converted weights are kept, mapped, and never trusted blindly."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import WeightsError
from quire.layers.factory import LayerFactory
from quire.models import loading
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from quire.weights.source import DummySource
from tests.models.checkpoints import VARIANTS, gpt2, llama, opt, prompts, save
from tests.models.paging import run_chunked


class Untouchable(FolderSource):
    """A source whose tensors must not be read."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the source was read although converted weights are there")


def open_model(source: FolderSource, quantization: str = "int8") -> DecoderModel:
    return load(source, LayerFactory.of(describe(source.config), quantization=quantization))


def logits_of(model: DecoderModel) -> Tensor:
    (text,) = prompts(17)
    return run_chunked(model, [text], [17], 4)[0]


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def converted_files(cache: Path) -> list[Path]:
    return sorted((cache / "converted").glob("*"))


def test_missing_tensors_are_counted_and_named(tmp_path: Path) -> None:
    save(tmp_path, llama())
    rewrite(
        tmp_path, {f"model.layers.{i}.mlp.up_proj.weight": None for i in range(3)} | {"lm_head.weight": None}
    )
    with pytest.raises(WeightsError, match=r"4 of 30 tensors are missing.*lm_head\.weight.*up_proj"):
        open_model(FolderSource(tmp_path), "none")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    save(tmp_path, llama())
    rewrite(tmp_path, {"model.layers.1.self_attn.k_proj.weight": torch.zeros(8, 48)})
    with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.k_proj.*\[8, 48\].*\[16, 48\]"):
        open_model(FolderSource(tmp_path), "none")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_weight_that_is_no_number_is_refused_with_the_name_of_its_tensor(
    name: str, value: float, tmp_path: Path, empty_cache: Path
) -> None:
    model = save(tmp_path / "model", llama())
    tensor = model.state_dict()[name].clone()
    tensor.view(-1)[77 % tensor.numel()] = value
    rewrite(tmp_path / "model", {name: tensor})
    with pytest.raises(WeightsError, match=rf"tensor {name} cannot be loaded: .*NaN or infinity"):
        open_model(FolderSource(tmp_path / "model"))
    assert not converted_files(empty_cache)


def test_tensors_that_no_model_needs_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, llama())
    right = logits_of(open_model(FolderSource(tmp_path), "none"))
    rewrite(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits_of(open_model(FolderSource(tmp_path), "none")), right)


@pytest.mark.parametrize(
    ("config", "outer", "other"),
    [(llama(), "model.", ""), (opt(), "model.decoder.", "decoder."), (gpt2(), "transformer.", "")],
    ids=["llama", "opt", "gpt2"],
)
def test_checkpoints_of_the_bare_decoder_load_too(
    config: object, outer: str, other: str, tmp_path: Path
) -> None:
    save(tmp_path, config)
    right = logits_of(open_model(FolderSource(tmp_path), "none"))
    path = tmp_path / "model.safetensors"
    renamed = {
        (other + name.removeprefix(outer) if name.startswith(outer) else name): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path)
    assert torch.equal(logits_of(open_model(FolderSource(tmp_path), "none")), right)


def test_progress_ends_at_the_number_of_tensors(tmp_path: Path) -> None:
    save(tmp_path, llama())
    source = FolderSource(tmp_path)
    seen: list[tuple[int, int]] = []
    load(source, LayerFactory.of(describe(source.config), quantization="none"), lambda *now: seen.append(now))
    assert seen == [(i + 1, source.num_tensors) for i in range(source.num_tensors)]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_folder_with_only_a_config_gets_random_weights_that_a_seed_fixes(
    quantization: str, tmp_path: Path, empty_cache: Path
) -> None:
    config = json.loads(llama().to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = DummySource(tmp_path)
    factory = LayerFactory.of(describe(source.config), quantization=quantization)
    first, again, other = (logits_of(load(source, factory, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
    assert not converted_files(empty_cache)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "opt-350m", "gpt2"])
@pytest.mark.parametrize("quantization", ["none", "int8", "llm-int8", "int4", "nf4"])
def test_parameters_and_adopt_are_inverse(
    variant: str, quantization: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS[variant]())
    source = FolderSource(tmp_path / "model")
    model = open_model(source, quantization)
    config = describe(source.config)
    twin = loading.build(config, LayerFactory.of(config, quantization=quantization))
    twin.adopt(model.parameters())
    assert torch.equal(logits_of(twin), logits_of(model))
    mine, theirs = model.parameters(), twin.parameters()
    assert all(mine[name].data_ptr() == theirs[name].data_ptr() for name in mine)


@pytest.mark.parametrize("quantization", ["int8", "llm-int8", "int4", "nf4", "fp4"])
def test_the_second_start_maps_converted_weights_and_reads_nothing_else(
    quantization: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", llama(hidden_size=192, intermediate_size=128))
    first = logits_of(open_model(FolderSource(tmp_path / "model"), quantization))
    assert len(converted_files(empty_cache)) == 1
    assert torch.equal(logits_of(open_model(Untouchable(tmp_path / "model"), quantization)), first)


def test_a_conversion_is_announced_and_happens_once(
    tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save(tmp_path / "model", llama())
    for _ in range(2):
        open_model(FolderSource(tmp_path / "model"))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("convert")]
    assert len(lines) == 2
    assert "once: later starts map them" in lines[0]
    assert "converted in " in lines[1]


def test_full_precision_keeps_no_converted_weights(tmp_path: Path, empty_cache: Path) -> None:
    save(tmp_path / "model", llama())
    open_model(FolderSource(tmp_path / "model"), "none")
    assert not converted_files(empty_cache)


@pytest.mark.parametrize("damage", ["cut", "zeros", "foreign", "empty", "short"])
def test_damaged_converted_weights_are_made_again(damage: str, tmp_path: Path, empty_cache: Path) -> None:
    save(tmp_path / "model", llama())
    right = logits_of(open_model(FolderSource(tmp_path / "model")))
    (path,) = converted_files(empty_cache)
    data = path.read_bytes()
    damaged = {
        "cut": data[: len(data) // 2],
        "zeros": data[:-2048] + bytes(2048),
        "foreign": b"not a tensor file at all",
        "empty": b"",
        "short": data[:-1],
    }
    path.write_bytes(damaged[damage])
    assert torch.equal(logits_of(open_model(FolderSource(tmp_path / "model"))), right)
    assert path.read_bytes() == data


def test_converted_weights_of_another_model_are_made_again(tmp_path: Path, empty_cache: Path) -> None:
    save(tmp_path / "small", llama(num_hidden_layers=1))
    save(tmp_path / "large", llama())
    open_model(FolderSource(tmp_path / "small"))
    (small,) = converted_files(empty_cache)
    right = logits_of(open_model(FolderSource(tmp_path / "large")))
    (large,) = set(converted_files(empty_cache)) - {small}
    os.replace(small, large)
    assert torch.equal(logits_of(open_model(FolderSource(tmp_path / "large"))), right)


def test_a_cache_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "model", llama())
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    assert logits_of(open_model(FolderSource(tmp_path / "model"))).isfinite().all()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_full_disk_leaves_nothing_behind_and_the_model_runs(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path / "model", llama())
    monkeypatch.setattr(os, "fsync", full)
    assert logits_of(open_model(FolderSource(tmp_path / "model"))).isfinite().all()
    assert "No space left" in caplog.text
    assert not converted_files(empty_cache)
    assert not list((empty_cache / "converted").iterdir())
