"""Experts that lie in one tensor: GGUF's and those of transformers' own layout give the same model."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.errors import ModelError, WeightsError
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from quire.weights.gguf import GgufSource
from quire.weights.source import Source
from tests.models.checkpoints import VARIANTS, mixtral, prompts, qwen2_moe, save
from tests.models.paging import run_chunked
from tests.weights.gguf_writing import LLAMA_KEYS, gguf_name, permuted, write

ARCHITECTURES = {"mixtral": "llama", "qwen2-moe": "qwen2moe", "qwen3-moe": "qwen3moe", "olmoe": "olmoe"}
PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@pytest.fixture(autouse=True)
def _own_cache(empty_cache: Path) -> None:
    """No test may write into the user's cache."""


def logits_of(source: Source, quantization: str = "none") -> list[torch.Tensor]:
    model = load(source, LayerFactory.of(describe(source.config), quantization=quantization))
    return run_chunked(model, prompts(19, 7), [5, 7], 4)


def gguf_tensors(folder: Path, config: Any, kind: str) -> dict[str, torch.Tensor]:
    """As llama.cpp's converter stacks and names them."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight").split(".")
        if "experts" in stem:
            stacked = f"blk.{stem[2]}.ffn_{PARTS[stem[-1]]}_exps.weight"
            stacks.setdefault(stacked, {})[int(stem[-2])] = tensor
        elif "shared_expert" in stem:
            found[f"blk.{stem[2]}.ffn_{PARTS[stem[-1]]}_shexp.weight"] = tensor
        elif stem[-1] == "shared_expert_gate":
            found[f"blk.{stem[2]}.ffn_gate_inp_shexp.weight"] = tensor[0]
        elif stem[-1] == "gate":
            found[f"blk.{stem[2]}.ffn_gate_inp.weight"] = tensor
        else:
            if kind == "mixtral" and stem[-1] in ("q_proj", "k_proj"):
                query = stem[-1] == "q_proj"
                tensor = permuted(tensor, config.num_attention_heads if query else config.num_key_value_heads)
            found[gguf_name(name)] = tensor
    experts = {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in stacks.items()}
    return {**found, **experts}


def gguf_keys(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        **LLAMA_KEYS,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": getattr(config, "num_local_experts", None) or config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_gguf_file_is_the_model_of_the_folder(kind: str, tmp_path: Path) -> None:
    config = VARIANTS[kind]()
    save(tmp_path / "model", config)
    tensors = gguf_tensors(tmp_path / "model", config, kind)
    folder = FolderSource(tmp_path / "model")
    source = GgufSource(write(tmp_path / "m.gguf", ARCHITECTURES[kind], gguf_keys(config), tensors))
    assert source.num_tensors == folder.num_tensors
    assert describe(source.config).architecture == describe(folder.config).architecture
    for one, other in zip(logits_of(source), logits_of(folder), strict=True):
        assert torch.equal(one, other)


def test_experts_in_blocks_stay_as_they_are(tmp_path: Path) -> None:
    config = qwen2_moe(hidden_size=64, num_attention_heads=4, moe_intermediate_size=32, num_hidden_layers=2)
    save(tmp_path / "model", config)
    tensors = gguf_tensors(tmp_path / "model", config, "qwen2-moe")
    kind = gguf.GGMLQuantizationType.Q8_0
    stacks = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_exps.weight")}
    raw = {name: (gguf.quants.quantize(stack.numpy(), kind), kind) for name, stack in stacks.items()}
    source = GgufSource(write(tmp_path / "m.gguf", "qwen2moe", gguf_keys(config), tensors, raw=raw))
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert source.encodings[name].scheme.name == "gguf-q8_0"
    exact = logits_of(FolderSource(tmp_path / "model"))
    for quantization in ("checkpoint", "none"):
        for one, other in zip(logits_of(source, quantization), exact, strict=True):
            assert 0 < (one - other).norm() < 0.1 * other.norm()


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe"])
def test_transformers_own_layout_is_the_model_of_the_original_one(kind: str, tmp_path: Path) -> None:
    model = save(tmp_path / "original", VARIANTS[kind]())
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    original, stacked = FolderSource(tmp_path / "original"), FolderSource(tmp_path / "stacked")
    assert stacked.num_tensors == original.num_tensors == len(list(stacked.tensors()))
    for one, other in zip(logits_of(stacked), logits_of(original), strict=True):
        assert torch.equal(one, other)


def test_a_stack_of_another_number_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    model = save(tmp_path / "original", VARIANTS["mixtral"]())
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    path = tmp_path / "stacked" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 6}))
    with pytest.raises(WeightsError, match=r"mlp\.experts\.\w+ is \[5, .*6 experts"):
        logits_of(FolderSource(tmp_path / "stacked"))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save(tmp_path, mixtral())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        logits_of(FolderSource(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7.*at most 6"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": ["one"]}, "mlp_only_layers"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ({"num_experts": 100_000}, "num_experts=100000.*at most 1024"),
    ],
)
def test_experts_that_make_no_sense_are_named(change: dict[str, object], message: str) -> None:
    config = json.loads(qwen2_moe().to_json_string()) | {"architectures": ["Qwen2MoeForCausalLM"]} | change
    with pytest.raises(ModelError, match=message):
        describe(config)


def test_a_mixture_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"GraniteMoeForCausalLM is not known.*Qwen3MoeForCausalLM"):
        describe({"architectures": ["GraniteMoeForCausalLM"]})
