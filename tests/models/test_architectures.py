"""Every architecture and variant gives transformers' logits, over pages, in ragged batches."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from quire.core.errors import ModelError, WeightsError
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.registry import architectures, describe
from quire.weights.folder import FolderSource
from tests.models.checkpoints import (
    LLAMA3_ROPE,
    VARIANTS,
    llama,
    longrope,
    olmo3,
    opt,
    prompts,
    reference_logits,
    save,
    two_ropes,
)
from tests.models.paging import Pages, only_native, run_chunked


def load_folder(folder: Path, dtype: str = "auto", quantization: str = "none") -> DecoderModel:
    source = FolderSource(folder)
    return load(source, LayerFactory.of(describe(source.config), dtype=dtype, quantization=quantization))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixed_batch_over_pages_gives_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = save(tmp_path, VARIANTS[variant]())
    model = load_folder(tmp_path)
    texts = prompts(19, 3, 33, 1)
    expected = [reference_logits(reference, text) for text in texts]
    assert max(logits.std(dim=-1).mean() for logits in expected) > 0.5, (
        "logits that hardly differ prove nothing"
    )
    for block_size, chunks in ((1, (19, 3, 33, 1)), (4, (5, 1, 7, 1)), (16, (1, 3, 32, 1))):
        found = run_chunked(model, texts, chunks, block_size)
        for logits, right in zip(found, expected, strict=True):
            torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "qwen2-moe", "opt-350m", "gpt2"])
def test_bfloat16_stays_near_transformers_in_bfloat16(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some virtual machines advertise matrix tiles that oneDNN then cannot use: torch dies of an illegal instruction.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    config = VARIANTS[variant]()
    reference = save(tmp_path, config, torch.bfloat16)
    model = load_folder(tmp_path, dtype="bfloat16")
    (text,) = prompts(20)
    (found,) = run_chunked(model, [text], [6], 4, "bfloat16")
    right = reference_logits(reference, text)
    assert found.dtype is torch.float32
    assert (found - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize(
    "config", [llama(initializer_range=48**-0.5), opt(init_std=48**-0.5)], ids=["llama", "opt"]
)
def test_bfloat16_logits_stay_within_five_percent_of_float32(
    config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance that docs/performance.md states and quire_lab.benchmarks.gpu_check holds a GPU to."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    save(tmp_path, config)
    texts = prompts(23, 9)
    exact = run_chunked(load_folder(tmp_path), texts, [6, 9], 4)
    half = run_chunked(load_folder(tmp_path, dtype="bfloat16"), texts, [6, 9], 4, "bfloat16")
    for one, other in zip(half, exact, strict=True):
        assert ((one - other).norm(dim=-1) / other.norm(dim=-1)).max() < 0.05
        assert not torch.equal(one, other)


@pytest.mark.parametrize("variant", [
    "llama-tied", "llama-gelu", "llama-gelu-tanh", "qwen2", "opt", "gpt2", "phi3", "granite", "olmo2", "smollm3",
    "gemma2", "gemma3", "qwen2-moe", "olmoe", "starcoder2", "neox", "falcon-40b", "bloom",
])  # fmt: skip
def test_int8_stays_near_full_precision(variant: str, tmp_path: Path, empty_cache: Path) -> None:
    save(tmp_path / "model", VARIANTS[variant]())
    texts = prompts(23, 9)
    full = run_chunked(load_folder(tmp_path / "model"), texts, [23, 9], 4)
    int8 = run_chunked(load_folder(tmp_path / "model", quantization="int8"), texts, [23, 9], 4)
    for one, other in zip(int8, full, strict=True):
        assert (one - other).norm() < 0.2 * other.norm()


@only_native
@pytest.mark.parametrize(("variant", "kv_dtype"), [
    *((variant, "float32") for variant in (
        "llama", "llama-gelu-tanh", "mistral-window", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe-window", "olmoe",
        "opt-350m", "gpt2", "granite", "olmo2", "gemma2", "gemma3", "falcon-40b", "falcon-rw", "bloom",
    )),
    *((variant, "int8") for variant in (
        "llama", "llama-gelu-tanh", "mistral-window", "qwen3", "opt-350m", "gpt2", "gemma2", "bloom",
    )),
])  # fmt: skip
def test_int8_gives_the_same_bits_alone_and_in_any_batch(
    variant: str, kv_dtype: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS[variant]())
    model = load_folder(tmp_path / "model", quantization="int8")
    texts = prompts(21, 34, 5)
    alone = [run_chunked(model, [text], [len(text)], 16, kv_dtype)[0] for text in texts]
    for block_size, chunks in ((1, (3, 34, 1)), (4, (21, 1, 5)), (16, (1, 8, 2))):
        for one, other in zip(run_chunked(model, texts, chunks, block_size, kv_dtype), alone, strict=True):
            assert torch.equal(one, other)


def test_an_int8_kv_cache_stays_near_a_full_one(tmp_path: Path) -> None:
    save(tmp_path, VARIANTS["llama"]())
    model, texts = load_folder(tmp_path), prompts(21, 34, 5)
    full = run_chunked(model, texts, [3, 34, 1], 4)
    int8 = run_chunked(model, texts, [3, 34, 1], 4, "int8")
    for one, other in zip(int8, full, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05
        assert not torch.equal(one, other)


def test_only_the_wanted_rows_come_back(tmp_path: Path) -> None:
    save(tmp_path, llama())
    model = load_folder(tmp_path)
    (text,) = prompts(12)
    pages = Pages(model, [12], 4)
    batch = pages.batch([(0, 0, text)])
    every = model(batch, pages.pool)
    wanted = torch.tensor([11, 2])
    torch.testing.assert_close(model(replace(batch, logits_indices=wanted), pages.pool), every[wanted])


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ModelError, match=r"MambaForCausalLM is not known.*LlamaForCausalLM") as caught:
        describe({"architectures": ["MambaForCausalLM"]})
    assert all(name in str(caught.value) for name in architectures())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("GraniteSpeechForCausalLM", "the nearest is GraniteForCausalLM;"),
        ("MllamaForConditionalGeneration", r"cross-attention: take a Llama 3\.1 or 3\.2 text model"),
        ("RWKV", "none is near;"),
        ("DeepseekV3ForCausalLM", r"latent vectors \(MLA\): take a distilled model"),
        (
            "FalconMambaForCausalLM",
            "recurrent state, not K and V: take a model with attention in every layer",
        ),
        ("WhisperForConditionalGeneration", "it reads audio, and Quire serves text;"),
        ("Qwen3VLForConditionalGeneration", "the nearest is Qwen3ForCausalLM;"),
        ("LlavaForConditionalGeneration", "the nearest is LlamaForCausalLM;"),
        ("UMT5ForConditionalGeneration", "the nearest is MT5ForConditionalGeneration;"),
    ],
)
def test_an_unknown_architecture_is_told_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=rf"architecture {name} is not known: .*{nearest}"):
        describe({"architectures": [name]})


def test_an_unknown_encoder_is_told_the_nearest_of_its_kind() -> None:
    with pytest.raises(ModelError, match="the nearest is ModernBertForSequenceClassification;"):
        describe({"architectures": ["DebertaV2ForSequenceClassification"]}, "embed")
    with pytest.raises(ModelError, match="CLIPModel is no encoder that is known here: it reads images"):
        describe({"architectures": ["CLIPModel"]}, "embed")


def test_a_config_without_architectures_is_told_which_to_add() -> None:
    said = r"no architectures \(model_type 'qwen3_moe'\): the nearest is Qwen3MoeForCausalLM; add \"architectures\""
    with pytest.raises(ModelError, match=said):
        describe({"model_type": "qwen3_moe"})


def in_a_multimodal_folder(folder: Path, outer: str) -> None:
    """Rewrites a text model as its part of a checkpoint that also has an encoder of images."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures")
    ends = {name: config.pop(name, None) for name in ("eos_token_id", "bos_token_id")}
    whole = {"architectures": [outer], "vision_config": {"hidden_size": 7}, "text_config": config, **ends}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    spelled = {re.sub("^model", "model.language_model", name): tensor for name, tensor in tensors.items()}
    vision = {"model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}
    save_file({**spelled, **vision}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("variant", "outer"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mistral-small", "Mistral3ForConditionalGeneration"),
    ],
)
def test_the_text_part_of_a_multimodal_checkpoint_is_the_text_model(
    variant: str, outer: str, tmp_path: Path
) -> None:
    reference = save(tmp_path, VARIANTS[variant]())
    in_a_multimodal_folder(tmp_path, outer)
    (text,) = prompts(20)
    (found,) = run_chunked(load_folder(tmp_path), [text], [7], 4)
    torch.testing.assert_close(found, reference_logits(reference, text), rtol=1e-4, atol=1e-4)


def test_another_text_part_is_refused() -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "ministral3"},
    }
    with pytest.raises(ModelError, match="text_config of 'ministral3': only that of a mistral model"):
        describe(config)


def test_gemma3_needs_only_what_its_multimodal_checkpoints_write() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = describe({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position) == (262208, 131072)
    assert config.tie_word_embeddings


def test_longrope_takes_its_long_factors_where_longer_sequences_are_served(tmp_path: Path) -> None:
    reference = save(tmp_path, longrope(8))
    (text,) = prompts(30)
    (found,) = run_chunked(load_folder(tmp_path), [text], [7], 4)
    torch.testing.assert_close(found, reference_logits(reference, text), rtol=1e-4, atol=1e-4)
    source = FolderSource(tmp_path)
    short = load(source, LayerFactory.of(describe(source.config), quantization="none", max_position=8))
    (found,) = run_chunked(short, [text[:8]], [3], 4)
    torch.testing.assert_close(found, reference_logits(reference, text[:8]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": False}, r"layers\.0\.self_attn\.k_proj\.bias has no place.*no bias"),
        ({"num_hidden_layers": 2}, r"tensor model\.layers\.2\.\S+ has no place.*fewer layers"),
        ({"num_hidden_layers": 4}, r"missing from the weights: model\.layers\.3\.input_layernorm\.weight"),
        (
            {"intermediate_size": 81},
            r"tensor model\.layers\.0\.mlp\.down_proj\.weight .*\[48, 80\].*\[48, 81\]",
        ),
    ],
)
def test_the_first_tensor_that_does_not_fit_the_config_is_named(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    save(tmp_path, llama(attention_bias=True))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WeightsError, match=message):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, r"spiral.*default.*yarn"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 4}, "6 attention heads.*4"),
        ({"hidden_act": "swish2"}, "swish2"),
    ],
)
def test_hyperparameters_that_make_no_sense_are_named(change: dict[str, object], message: str) -> None:
    config = json.loads(llama().to_json_string()) | {"architectures": ["LlamaForCausalLM"]} | change
    with pytest.raises(ModelError, match=message):
        describe(config)


@pytest.mark.parametrize(
    "config",
    [
        llama(rope_parameters=dict(LLAMA3_ROPE)),
        olmo3(rope_parameters=two_ropes(attention_factor=1.3, beta_fast=8.0)),
    ],
    ids=["llama", "olmo3"],
)
def test_old_and_new_spellings_of_rope_are_the_same_model(config: PreTrainedConfig, tmp_path: Path) -> None:
    reference = save(tmp_path, config)
    (text,) = prompts(40)
    (new,) = run_chunked(load_folder(tmp_path), [text], [40], 16)
    torch.testing.assert_close(new, reference_logits(reference, text), rtol=1e-4, atol=1e-4)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    parameters = written.pop("rope_parameters")
    parameters = parameters.get("full_attention", parameters)
    written["rope_theta"] = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    written["rope_scaling"] = parameters
    path.write_text(json.dumps(written))
    (old,) = run_chunked(load_folder(tmp_path), [text], [40], 16)
    assert torch.equal(new, old)


def test_describe_tells_what_every_room_needs(tmp_path: Path) -> None:
    save(tmp_path, VARIANTS["qwen3"](), torch.bfloat16)
    config = describe(json.loads((tmp_path / "config.json").read_text()))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (97, 48, 80)
    assert (config.max_position, config.dtype) == (64, "bfloat16")
