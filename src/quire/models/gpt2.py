"""GPT-2. Its checkpoints keep matrices transposed, as [inputs, outputs]."""

from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig
from quire.layers.factory import LayerFactory
from quire.layers.parameters import Loader
from quire.models.gpt_decoder import GptConfig, GptDecoder, describe_gpt
from quire.models.model import DecoderModel
from quire.weights.hyperparameters import MAX_LAYERS, number, positive


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    hidden_size = positive(hf, "n_embd")
    return describe_gpt(
        architecture,
        hf,
        hidden_size=hidden_size,
        num_heads=positive(hf, "n_head"),
        num_layers=positive(hf, "n_layer", high=MAX_LAYERS),
        intermediate_size=positive(hf, "n_inner", 4 * hidden_size),
        max_position=positive(hf, "n_positions", 1024),
    )


def build(config: ModelConfig, factory: LayerFactory) -> DecoderModel:
    return Gpt2(config, factory)


def _gpt_config(config: ModelConfig) -> GptConfig:
    hf = config.hf
    scale = config.head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx", False))
    return GptConfig(
        activation=str(hf.get("activation_function", "gelu_new")),
        eps=number(hf, "layer_norm_epsilon", 1e-5),
        scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(config.num_layers)),
    )


class Gpt2(GptDecoder):
    """GptDecoder under GPT-2's names."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__(config, _gpt_config(config), factory)

    def loaders(self) -> dict[str, Loader]:
        prefix = "transformer."
        loaders = self.head.loaders(self.tokens, f"{prefix}wte.weight", "lm_head.weight")
        if self.positions is not None:
            loaders[f"{prefix}wpe.weight"] = self.positions.loader()
        if self.norm is not None:
            loaders |= self.norm.loaders(f"{prefix}ln_f")
        for i, block in enumerate(self.blocks):
            layer = f"{prefix}h.{i}."
            loaders |= block.attention_norm.loaders(f"{layer}ln_1")
            if block.mlp_norm is not None:
                loaders |= block.mlp_norm.loaders(f"{layer}ln_2")
            parts = (
                ("attn.c_attn", block.qkv),
                ("attn.c_proj", block.output),
                ("mlp.c_fc", block.up),
                ("mlp.c_proj", block.down),
            )
            for name, linear in parts:
                loaders |= linear.loaders(f"{layer}{name}", transposed=True)
        return loaders
