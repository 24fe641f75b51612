"""GPT-2. Its checkpoints keep matrices transposed, as [inputs, outputs]."""

from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig
from quire.layers.factory import LayerFactory
from quire.layers.parameters import Loader
from quire.models.gpt_decoder import GptConfig, GptDecoder
from quire.models.hyperparameters import checkpoint_dtype, first_token_id, head_size, positive, token_ids
from quire.models.model import Model


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    hidden_size = positive(hf, "n_embd")
    num_heads = positive(hf, "n_head")
    return ModelConfig(
        architecture=architecture,
        vocab_size=positive(hf, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=positive(hf, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size({}, hidden_size, num_heads),
        intermediate_size=positive(hf, "n_inner", 4 * hidden_size),
        max_position=positive(hf, "n_positions", 1024),
        dtype=checkpoint_dtype(hf),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        eos_token_ids=token_ids(hf, "eos_token_id"),
        bos_token_id=first_token_id(hf, "bos_token_id"),
        hf=dict(hf),
    )


def build(config: ModelConfig, factory: LayerFactory) -> Model:
    return Gpt2(config, factory)


def _kind(config: ModelConfig) -> GptConfig:
    hf = config.hf
    scale = config.head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx", False))
    return GptConfig(
        activation=hf.get("activation_function", "gelu_new"),
        eps=float(hf.get("layer_norm_epsilon", 1e-5)),
        scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(config.num_layers)),
    )


class Gpt2(GptDecoder):
    """The classic decoder under GPT-2's names."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__(config, _kind(config), factory)

    def loaders(self) -> dict[str, Loader]:
        prefix = "transformer."
        found = self.embedding_loaders(f"{prefix}wte.weight", "lm_head.weight")
        found[f"{prefix}wpe.weight"] = self.positions.loader()
        if self.norm is not None:
            found |= self.norm.loaders(f"{prefix}ln_f")
        for i, block in enumerate(self.blocks):
            layer = f"{prefix}h.{i}."
            found |= block.attention_norm.loaders(f"{layer}ln_1")
            found |= block.mlp_norm.loaders(f"{layer}ln_2")
            pieces = (
                ("attn.c_attn", block.qkv),
                ("attn.c_proj", block.output),
                ("mlp.c_fc", block.up),
                ("mlp.c_proj", block.down),
            )
            for name, linear in pieces:
                found[f"{layer}{name}.weight"] = linear.weight_loader(transposed=True)
                found[f"{layer}{name}.bias"] = linear.bias_loader()
        return found
