"""Mixtures of experts on the Llama decoder: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.layers.lora import LoraBatch
from quire.layers.moe import MixtureNames, MixtureOfExperts, MixtureShape
from quire.layers.parameters import Loader
from quire.models import llama
from quire.models.llama import Llama, LlamaLayer
from quire.models.llama_variants import LlamaVariant
from quire.weights.hyperparameters import number, positive, whole

MIXTRAL, OLMOE = "MixtralForCausalLM", "OlmoeForCausalLM"
QWEN2, QWEN3 = "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"
MAX_EXPERTS = 1024  # far more than any layer has; routing kernels hold all of a token's probabilities at once
_NAMES = {MIXTRAL: MixtureNames("block_sparse_moe.", "w1", "w3", "w2")}
_SHARED_DEFAULT = 5632  # of Qwen2-MoE, where config.json says nothing


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    if architecture == MIXTRAL and hf.get("num_key_value_heads") is None:
        hf = {**hf, "num_key_value_heads": 8}
    if architecture in (QWEN2, QWEN3) and hf.get("use_sliding_window") and hf.get("layer_types") is None:
        hf = {**hf, "layer_types": _window_layers(architecture, hf)}
    if (hf.get("hidden_act") or "silu") != "silu":
        raise ModelError(
            f"hidden_act={hf['hidden_act']!r} is not known for {architecture}: experts have silu"
        )
    if hf.get("clip_qkv") is not None:
        number(hf, "clip_qkv", 1.0)
    config = llama.describe(architecture, hf)
    mixture_shape(config)
    sparse_layers(config)
    return replace(config, windows=_windows(config))


def mixture_shape(config: ModelConfig) -> MixtureShape:
    """The experts of a sparse layer, as config.json has them."""
    architecture, hf = config.architecture, config.hf
    named = next(
        (name for name in ("num_local_experts", "num_experts") if hf.get(name) is not None), "num_experts"
    )
    num_experts = positive(hf, named, high=MAX_EXPERTS)
    qwen = architecture in (QWEN2, QWEN3)
    shared = positive(hf, "shared_expert_intermediate_size", _SHARED_DEFAULT) if architecture == QWEN2 else 0
    return MixtureShape(
        num_experts=num_experts,
        top_k=positive(hf, "num_experts_per_tok", high=num_experts),
        hidden=config.hidden_size,
        inner=positive(hf, "moe_intermediate_size") if qwen else config.intermediate_size,
        shared_inner=shared,
        renormalize=architecture == MIXTRAL or bool(hf.get("norm_topk_prob", False)),
    )


def sparse_layers(config: ModelConfig) -> frozenset[int]:
    """Layers with experts; the others are dense."""
    hf, layers = config.hf, range(config.num_layers)
    if config.architecture not in (QWEN2, QWEN3):
        return frozenset(layers)
    step, dense = positive(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and i >= 0 for i in dense):
        raise ModelError(f"config.json has mlp_only_layers={dense!r}, which must be a list of layer numbers")
    return frozenset(i for i in layers if (i + 1) % step == 0 and i not in dense)


def _window_layers(architecture: str, hf: Mapping[str, Any]) -> list[str]:
    """Qwen2-MoE has windows in every second of its first layers, Qwen3-MoE in all."""
    first = whole(hf, "max_window_layers", 28)
    windowed = [
        architecture == QWEN3 or (i % 2 == 0 and i < first) for i in range(positive(hf, "num_hidden_layers"))
    ]
    return ["sliding_attention" if window else "full_attention" for window in windowed]


def _variant(config: ModelConfig) -> LlamaVariant:
    architecture, hf = config.architecture, config.hf
    bias = bool(hf.get("attention_bias", False)) and architecture in (QWEN3, OLMOE)
    return LlamaVariant(
        qkv_bias=bias or (architecture == QWEN2 and bool(hf.get("qkv_bias", True))),
        output_bias=bias,
        head_norm=architecture == QWEN3,
        row_norm=architecture == OLMOE,
        windows=_windows(config),
        ropes=(hf,) * config.num_layers,
        eps=number(hf, "rms_norm_eps", 1e-5 if architecture == OLMOE else 1e-6),
    )


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """Mixtral has one window everywhere, or none; Qwen where it is switched on, in the layers that are listed."""
    hf, window = config.hf, whole(config.hf, "sliding_window", 0)
    if config.architecture == MIXTRAL:
        return (window,) * config.num_layers
    if not hf.get("use_sliding_window", False):
        return (0,) * config.num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in hf["layer_types"])


class MixtureLayer(LlamaLayer):
    """A layer with experts in place of gate, up and down."""

    def _make_feed_forward(self, config: ModelConfig, variant: LlamaVariant, factory: LayerFactory) -> None:
        self._names = _NAMES.get(config.architecture, MixtureNames("mlp."))
        self._limit = config.hf.get("clip_qkv")
        self.mixture = MixtureOfExperts(factory, mixture_shape(config))

    def attend(self, hidden: Tensor, batch: Batch, pool: Pool) -> Tensor:
        """OLMoE may clip q, k and v, behind their norms."""
        if self._limit is None:
            return super().attend(hidden, batch, pool)
        qkv = self.qkv.normed(hidden, self.input_norm, batch.lora)
        query, key = self._query_rows, self._key_rows
        for norm, rows in ((self.q_norm, qkv[:, :query]), (self.k_norm, qkv[:, query : query + key])):
            if norm is not None:
                norm.heads(rows[:, None])
        return self.attention(qkv.clamp_(-self._limit, self._limit), batch, pool)

    def finish(self, attended: Tensor, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        hidden = self.output(attended, hidden, lora)
        assert self.post_norm is not None, "no mixture has norms after its layers only"
        return self.mixture(self.post_norm(hidden), hidden, lora)

    def _feed_forward_loaders(self, prefix: str) -> dict[str, Loader]:
        return self.mixture.loaders(prefix, self._names)


class Mixture(Llama):
    """Sparse and dense layers on the Llama decoder."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        self._sparse = sparse_layers(config)
        self.mixture = mixture_shape(config) if self._sparse else None  # of every sparse layer
        super().__init__(config, factory, _variant(config))

    @property
    def recordable(self) -> bool:
        mixtures = [block.mixture for block in self.blocks if isinstance(block, MixtureLayer)]
        clips = self.config.hf.get("clip_qkv") is not None  # by torch, which a tape cannot record
        return super().recordable and not clips and all(mixture.recordable for mixture in mixtures)

    def _kind(self, index: int) -> type[LlamaLayer]:
        return MixtureLayer if index in self._sparse else LlamaLayer


build = Mixture
