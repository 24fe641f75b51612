"""The Llama family, from Llama itself to Gemma. A LlamaVariant holds the differences."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.factory import ATTENTION, GATES, MLP, LayerFactory
from quire.layers.linear import Linear
from quire.layers.lora import LoraBatch
from quire.layers.norm import RMSNorm
from quire.layers.parameters import Composite, LayerStack, Loader
from quire.layers.rope import position_limit
from quire.models.llama_variants import TWO_ROPES, LlamaVariant, completed, ropes_by_kind, variant_of
from quire.models.model import Layer
from quire.weights.hyperparameters import generates, head_size, model_config, positive


def describe(architecture: str, given: Mapping[str, Any]) -> ModelConfig:
    hf = completed(architecture, given)
    hidden_size = positive(hf, "hidden_size")
    num_heads = positive(hf, "num_attention_heads")
    if _gate_name(hf) not in GATES:
        raise ModelError(
            f"hidden_act={_gate_name(hf)!r} is not known for {architecture}: only {', '.join(GATES)} are"
        )
    rotated = ropes_by_kind(architecture, hf)[0] if architecture in TWO_ROPES else hf
    config = model_config(
        architecture,
        hf,
        num_kv_heads=positive(hf, "num_key_value_heads", num_heads),
        head_dim=head_size(hf, hidden_size, num_heads),
        max_position=position_limit(rotated),  # an unknown rope type is refused before anything is loaded
        **generates(hf),
    )
    return replace(config, windows=variant_of(config).windows)


def _gate_name(hf: Mapping[str, Any]) -> str:
    return str(hf.get("hidden_act") or "silu")


class LlamaLayer(Composite):
    """norm → qkv → attention → output, norm → gate, up → down; both sums are made by the last projection, or by the
    norm that follows it."""

    def __init__(
        self,
        config: ModelConfig,
        variant: LlamaVariant,
        factory: LayerFactory,
        index: int,
        cos_sin: Tensor | None,
    ):
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden = config.hidden_size
        self._query_rows, self._key_rows = heads * head_dim, kv_heads * head_dim
        self._fused = variant.fused
        self.input_norm = _norm(factory, config, variant) if variant.norms_before else None
        self.qkv = factory.linear(self._query_rows + 2 * self._key_rows, hidden, variant.qkv_bias)
        self.attention = factory.attention(
            index, heads, kv_heads, head_dim, variant.scale, variant.windows[index], cos_sin, variant.soft_cap
        )
        self.output = factory.linear(hidden, self._query_rows, variant.output_bias, joined=ATTENTION)
        self.output_norm = _norm(factory, config, variant) if variant.norms_after else None
        self.post_norm = _norm(factory, config, variant) if variant.norms_before else None
        self._make_feed_forward(config, variant, factory)
        self.down_norm = _norm(factory, config, variant) if variant.norms_after else None
        self.q_norm, self.k_norm = (
            factory.rms_norm(rows if variant.row_norm else head_dim, variant.eps, offset=variant.norm_offset)
            if variant.head_norm or variant.row_norm
            else None
            for rows in (self._query_rows, self._key_rows)
        )
        self._gelu_gate = factory.gelu_gate(_gate_name(config.hf))  # None: silu

    def _make_feed_forward(self, config: ModelConfig, variant: LlamaVariant, factory: LayerFactory) -> None:
        self._inner = config.intermediate_size
        self.gate_up = factory.linear(2 * self._inner, config.hidden_size, variant.mlp_bias)
        self.down = factory.linear(config.hidden_size, self._inner, variant.mlp_bias, joined=MLP)

    def attend(self, hidden: Tensor, batch: Batch, pool: Pool) -> Tensor:
        """hidden [T, hidden] -> attention's result before its output projection [T, heads * head_dim]."""
        qkv = self.qkv.normed(hidden, self.input_norm, batch.lora)
        return self.attention(qkv, batch, pool, self.q_norm, self.k_norm)

    def finish(self, attended: Tensor, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        """The rest of the layer, token by token."""
        hidden = _added(self.output, self.output_norm, attended, hidden, lora)
        if self._gelu_gate is None:
            gated = self.gate_up.normed_silu_mul(hidden, self.post_norm, lora)
        else:
            gated = self._gelu_gate(self.gate_up.normed(hidden, self.post_norm, lora))
        return _added(self.down, self.down_norm, gated, hidden, lora)

    def loaders(self, prefix: str) -> dict[str, Loader]:
        query, key = self._query_rows, self._key_rows
        attention = f"{prefix}self_attn."
        sandwiched = self.post_norm is not None and self.output_norm is not None
        norms = {
            f"{prefix}input_layernorm": self.input_norm,
            f"{prefix}{'pre_feedforward' if sandwiched else 'post_attention'}_layernorm": self.post_norm,
            f"{attention}q_norm": self.q_norm,
            f"{attention}k_norm": self.k_norm,
        }
        if self.output_norm is not None:
            norms[f"{prefix}post_attention_layernorm"] = self.output_norm
            norms[f"{prefix}post_feedforward_layernorm"] = self.down_norm
        loaders = {f"{name}.weight": norm.loader() for name, norm in norms.items() if norm is not None}
        rows = {f"{attention}q_proj": query, f"{attention}k_proj": key, f"{attention}v_proj": key}
        loaders |= self.qkv.loaders(f"{attention}qkv_proj") if self._fused else self.qkv.part_loaders(rows)
        loaders |= self.output.loaders(f"{attention}o_proj")
        return loaders | self._feed_forward_loaders(prefix)

    def _feed_forward_loaders(self, prefix: str) -> dict[str, Loader]:
        mlp, inner = f"{prefix}mlp.", self._inner
        rows = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        gate_up = self.gate_up
        loaders = gate_up.loaders(f"{mlp}gate_up_proj") if self._fused else gate_up.part_loaders(rows)
        return loaders | self.down.loaders(f"{mlp}down_proj")


def _norm(factory: LayerFactory, config: ModelConfig, variant: LlamaVariant, scale: float = 1.0) -> RMSNorm:
    """A norm of hidden states. They are kept divided by `residual_scale`, so that a sum needs no product, and an RMS
    norm does not see the difference once its epsilon is divided by the square."""
    eps = variant.eps / variant.residual_scale**2
    return factory.rms_norm(config.hidden_size, eps, scale, variant.norm_offset * scale)


def _added(linear: Linear, norm: RMSNorm | None, x: Tensor, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
    """hidden + linear(x), or + norm(linear(x)); hidden may be overwritten."""
    return linear(x, hidden, lora) if norm is None else norm.onto(linear(x, lora=lora), hidden)


def _rotary_tables(config: ModelConfig, variant: LlamaVariant, factory: LayerFactory) -> list[Tensor | None]:
    """One per layer; layers of the same settings share one."""
    kinds = {id(rope): rope for rope in variant.ropes}
    tables = {
        kind: None if rope is None else factory.rotary(rope, config.head_dim, config.max_position)
        for kind, rope in kinds.items()
    }
    return [tables[id(rope)] for rope in variant.ropes]


class Llama(LayerStack):
    """Every operation of the forward pass is one kernel; between them are only views."""

    def __init__(
        self, config: ModelConfig, factory: LayerFactory, variant: LlamaVariant | None = None
    ) -> None:
        self.config = config
        self._factory = factory
        self._select = factory.row_selection()
        variant = variant or variant_of(config)
        self._logits_cap = variant.logits_cap
        tables = _rotary_tables(config, variant, factory)
        self.embedding = factory.embedding(
            config.vocab_size, config.hidden_size, scale=variant.embedding_scale / variant.residual_scale
        )
        self.blocks: list[LlamaLayer] = [
            self._kind(i)(config, variant, factory, i, table) for i, table in enumerate(tables)
        ]
        self.stack: list[Layer] = [*self.blocks]
        self.norm = _norm(factory, config, variant, variant.logits_scale)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = factory.output_head(config.vocab_size, config.hidden_size, tied_to)

    def _kind(self, index: int) -> type[LlamaLayer]:
        """The class of a layer."""
        return LlamaLayer

    @property
    def recordable(self) -> bool:
        """Known once weights are loaded: some have no native kernel, and torch caps logits."""
        return self._factory.recordable and self.embedding.recordable and not self._logits_cap

    def __call__(self, batch: Batch, pool: Pool) -> Tensor:
        return self.norm(self.through(self.embedding(batch.token_ids, batch.lora), batch, pool, self.stack))

    def through(
        self, hidden: Tensor, batch: Batch, pool: Pool, stack: list[Layer], ends: bool = True
    ) -> Tensor:
        """hidden [T, hidden] through these layers; if they are the last, [L, hidden] where logits are wanted."""
        for layer in stack[:-1] if ends else stack:
            hidden = layer.finish(layer.attend(hidden, batch, pool), hidden, batch.lora)
        if not ends:
            return hidden
        # what follows the last attention is needed only where logits are
        last, wanted = stack[-1], batch.logits_indices
        attended = last.attend(hidden, batch, pool)
        return last.finish(self._select(attended, wanted), self._select(hidden, wanted), batch.wanted_lora)

    def logits(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        logits = self.head(hidden, lora)
        if not self._logits_cap:
            return logits
        return logits.div_(self._logits_cap).tanh_() * self._logits_cap  # tanh's result is kept for gradients

    def loaders(self) -> dict[str, Loader]:
        loaders = {"model.norm.weight": self.norm.loader()}
        loaders |= self.head.loaders(self.embedding, "model.embed_tokens.weight", "lm_head.weight")
        for i, block in enumerate(self.blocks):
            loaders |= block.loaders(f"model.layers.{i}.")
        return loaders


build = Llama
