"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3. A LlamaVariant holds the differences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.factory import GATES, LayerFactory
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Composite, LayerStack, Loader
from quire.layers.rope import position_limit, rope_parameters
from quire.models.model import DecoderModel, Layer
from quire.weights.hyperparameters import (
    MAX_LAYERS,
    checkpoint_dtype,
    first_token_id,
    head_size,
    number,
    positive,
    token_ids,
    whole,
)


@dataclass(frozen=True, slots=True)
class LlamaVariant:
    """A member of the family."""

    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    head_norm: bool  # q and k are normalised per head
    windows: tuple[int, ...]  # per layer; 0: none


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    hidden_size = positive(hf, "hidden_size")
    num_heads = positive(hf, "num_attention_heads")
    num_kv_heads = positive(
        hf, "num_key_value_heads", 8 if architecture == "MistralForCausalLM" else num_heads
    )
    if num_heads % num_kv_heads != 0:
        raise ModelError(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    if _gate_name(hf) not in GATES:
        raise ModelError(
            f"hidden_act={_gate_name(hf)!r} is not known for {architecture}: only {', '.join(GATES)} are"
        )
    rope_parameters(hf)  # an unknown rope type is refused before anything is loaded
    config = ModelConfig(
        architecture=architecture,
        vocab_size=positive(hf, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=positive(hf, "num_hidden_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size(hf, hidden_size, num_heads, 128 if architecture == "Qwen3ForCausalLM" else None),
        intermediate_size=positive(hf, "intermediate_size"),
        max_position=position_limit(hf),
        dtype=checkpoint_dtype(hf),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        eos_token_ids=token_ids(hf, "eos_token_id"),
        bos_token_id=first_token_id(hf, "bos_token_id"),
        hf=dict(hf),
    )
    _windows(config)
    return config


def build(config: ModelConfig, factory: LayerFactory) -> DecoderModel:
    return Llama(config, factory)


def _gate_name(hf: Mapping[str, Any]) -> str:
    return str(hf.get("hidden_act") or "silu")


def _variant(config: ModelConfig) -> LlamaVariant:
    architecture, hf = config.architecture, config.hf
    qwen2, mistral = architecture == "Qwen2ForCausalLM", architecture == "MistralForCausalLM"
    attention_bias = bool(hf.get("attention_bias", False)) and not qwen2 and not mistral
    return LlamaVariant(
        qkv_bias=attention_bias or qwen2,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        head_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(config),
    )


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """Mistral has one window everywhere; Qwen only where it is switched on, and then from a layer on."""
    hf, layers = config.hf, range(config.num_layers)
    if config.architecture == "MistralForCausalLM":
        return (_window(hf),) * config.num_layers
    if config.architecture == "LlamaForCausalLM" or not hf.get("use_sliding_window", False):
        return (0,) * config.num_layers
    window = _window(hf)
    kinds = hf.get("layer_types")
    if kinds is None:
        first = whole(hf, "max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in layers)
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise ModelError(f"config.json has layer_types={kinds!r}: it must list {config.num_layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _window(hf: Mapping[str, Any]) -> int:
    """0 or null: none."""
    return whole(hf, "sliding_window", 0) if "sliding_window" in hf else 4096


class LlamaLayer(Composite):
    """norm → qkv → attention → output, norm → gate, up → down; both sums are made by the last projection."""

    def __init__(
        self, config: ModelConfig, variant: LlamaVariant, factory: LayerFactory, index: int, cos_sin: Tensor
    ):
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        eps = number(config.hf, "rms_norm_eps", 1e-6)
        hidden, inner = config.hidden_size, config.intermediate_size
        self._query_rows, self._key_rows, self._inner = heads * head_dim, kv_heads * head_dim, inner
        self.input_norm = factory.rms_norm(hidden, eps)
        self.qkv = factory.linear(self._query_rows + 2 * self._key_rows, hidden, variant.qkv_bias)
        self.attention = factory.attention(
            index, heads, kv_heads, head_dim, window=variant.windows[index], cos_sin=cos_sin
        )
        self.output = factory.linear(hidden, self._query_rows, variant.output_bias)
        self.post_norm = factory.rms_norm(hidden, eps)
        self.gate_up = factory.linear(2 * inner, hidden, variant.mlp_bias)
        self.down = factory.linear(hidden, inner, variant.mlp_bias)
        self.q_norm = factory.rms_norm(head_dim, eps) if variant.head_norm else None
        self.k_norm = factory.rms_norm(head_dim, eps) if variant.head_norm else None
        self._gelu_gate = factory.gelu_gate(_gate_name(config.hf))  # None: silu

    def attend(self, hidden: Tensor, batch: Batch, pool: Pool) -> Tensor:
        """hidden [T, hidden] -> attention's result before its output projection [T, heads * head_dim]."""
        qkv = self.qkv.normed(hidden, self.input_norm, batch.lora)
        return self.attention(qkv, batch, pool, self.q_norm, self.k_norm)

    def finish(self, attended: Tensor, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        """The rest of the layer, token by token."""
        hidden = self.output(attended, hidden, lora)
        if self._gelu_gate is None:
            gated = self.gate_up.normed_silu_mul(hidden, self.post_norm, lora)
        else:
            gated = self._gelu_gate(self.gate_up.normed(hidden, self.post_norm, lora))
        return self.down(gated, hidden, lora)

    def loaders(self, prefix: str) -> dict[str, Loader]:
        query, key, inner = self._query_rows, self._key_rows, self._inner
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        loaders = {
            f"{prefix}input_layernorm.weight": self.input_norm.loader(),
            f"{prefix}post_attention_layernorm.weight": self.post_norm.loader(),
        }
        parts = (
            (f"{attention}q_proj", self.qkv, 0, query),
            (f"{attention}k_proj", self.qkv, query, key),
            (f"{attention}v_proj", self.qkv, query + key, key),
            (f"{attention}o_proj", self.output, 0, None),
            (f"{mlp}gate_proj", self.gate_up, 0, inner),
            (f"{mlp}up_proj", self.gate_up, inner, inner),
            (f"{mlp}down_proj", self.down, 0, None),
        )
        for name, linear, first_row, num_rows in parts:
            loaders |= linear.loaders(name, first_row, num_rows)
        if self.q_norm is not None and self.k_norm is not None:
            loaders[f"{attention}q_norm.weight"] = self.q_norm.loader()
            loaders[f"{attention}k_norm.weight"] = self.k_norm.loader()
        return loaders


class Llama(LayerStack):
    """Every operation of the forward pass is one kernel; between them are only views."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        self.config = config
        self._factory = factory
        self._select = factory.row_selection()
        variant = _variant(config)
        cos_sin = factory.rotary(config.hf, config.head_dim, config.max_position)
        self.embedding = factory.embedding(config.vocab_size, config.hidden_size)
        self.blocks: list[LlamaLayer] = [
            LlamaLayer(config, variant, factory, i, cos_sin) for i in range(config.num_layers)
        ]
        self.stack: list[Layer] = [*self.blocks]
        self.norm = factory.rms_norm(config.hidden_size, number(config.hf, "rms_norm_eps", 1e-6))
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = factory.output_head(config.vocab_size, config.hidden_size, tied_to)

    @property
    def recordable(self) -> bool:
        """Known once weights are loaded: some have no native kernel."""
        return self._factory.recordable

    def __call__(self, batch: Batch, pool: Pool) -> Tensor:
        hidden = self.embedding(batch.token_ids, batch.lora)
        for layer in self.stack[:-1]:
            hidden = layer.finish(layer.attend(hidden, batch, pool), hidden, batch.lora)
        # what follows the last attention is needed only where logits are
        last, wanted = self.stack[-1], batch.logits_indices
        attended = last.attend(hidden, batch, pool)
        hidden = last.finish(self._select(attended, wanted), self._select(hidden, wanted), batch.wanted_lora)
        return self.norm(hidden)

    def logits(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        return self.head(hidden, lora)

    def loaders(self) -> dict[str, Loader]:
        loaders = {"model.norm.weight": self.norm.loader()}
        loaders |= self.head.loaders(self.embedding, "model.embed_tokens.weight", "lm_head.weight")
        for i, block in enumerate(self.blocks):
            loaders |= block.loaders(f"model.layers.{i}.")
        return loaders
