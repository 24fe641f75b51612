"""OPT in every size: norms before or after (350m), word embeddings of another width, positions that start at 2."""

from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig
from quire.layers.factory import LayerFactory
from quire.layers.parameters import Loader
from quire.models.gpt_decoder import GptConfig, GptDecoder, describe_gpt
from quire.models.model import DecoderModel
from quire.weights.hyperparameters import MAX_LAYERS, positive

POSITION_OFFSET = 2  # the first two rows of the position table belong to padding


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    return describe_gpt(
        architecture,
        hf,
        hidden_size=positive(hf, "hidden_size"),
        num_heads=positive(hf, "num_attention_heads"),
        num_layers=positive(hf, "num_hidden_layers", high=MAX_LAYERS),
        intermediate_size=positive(hf, "ffn_dim"),
        max_position=positive(hf, "max_position_embeddings"),
    )


def build(config: ModelConfig, factory: LayerFactory) -> DecoderModel:
    return Opt(config, factory)


def _gpt_config(config: ModelConfig) -> GptConfig:
    hf = config.hf
    norm_first = bool(hf.get("do_layer_norm_before", True))
    return GptConfig(
        activation=str(hf.get("activation_function", "relu")),
        eps=1e-5,
        scales=(config.head_dim**-0.5,) * config.num_layers,
        bias=bool(hf.get("enable_bias", True)),
        affine=bool(hf.get("layer_norm_elementwise_affine", True)),
        norm_first=norm_first,
        final_norm=norm_first and not hf.get("_remove_final_layer_norm", False),
        embedding_width=positive(hf, "word_embed_proj_dim", config.hidden_size),
        skipped_positions=POSITION_OFFSET,
    )


class Opt(GptDecoder):
    """GptDecoder under OPT's names."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__(config, _gpt_config(config), factory)

    def loaders(self) -> dict[str, Loader]:
        prefix = "model.decoder."
        loaders = self.head.loaders(self.tokens, f"{prefix}embed_tokens.weight", "lm_head.weight")
        if self.positions is not None:
            loaders[f"{prefix}embed_positions.weight"] = self.positions.loader()
        if self.norm is not None:
            loaders |= self.norm.loaders(f"{prefix}final_layer_norm")
        if self.project_in is not None and self.project_out is not None:
            loaders |= self.project_in.loaders(f"{prefix}project_in")
            loaders |= self.project_out.loaders(f"{prefix}project_out")
        for i in range(self.config.num_layers):
            loaders |= self._layer_loaders(f"{prefix}layers.{i}.", i)
        return loaders

    def _layer_loaders(self, prefix: str, index: int) -> dict[str, Loader]:
        block, hidden = self.blocks[index], self.config.hidden_size
        loaders = block.attention_norm.loaders(f"{prefix}self_attn_layer_norm")
        if block.mlp_norm is not None:
            loaders |= block.mlp_norm.loaders(f"{prefix}final_layer_norm")
        parts = (
            ("self_attn.q_proj", block.qkv, 0, hidden),
            ("self_attn.k_proj", block.qkv, hidden, hidden),
            ("self_attn.v_proj", block.qkv, 2 * hidden, hidden),
            ("self_attn.out_proj", block.output, 0, None),
            ("fc1", block.up, 0, None),
            ("fc2", block.down, 0, None),
        )
        for name, linear, first_row, num_rows in parts:
            loaders |= linear.loaders(f"{prefix}{name}", first_row, num_rows)
        return loaders
