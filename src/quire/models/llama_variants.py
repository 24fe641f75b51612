"""Members of the Llama family: what each architecture's config.json means for the layers of llama.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.weights.hyperparameters import number, positive, whole

GEMMA, GEMMA2, GEMMA3 = "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"
GRANITE, LLAMA, MISTRAL = "GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"
OLMO2, OLMO3, PHI3 = "Olmo2ForCausalLM", "Olmo3ForCausalLM", "Phi3ForCausalLM"
QWEN2, QWEN3, SMOLLM3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"
_GEMMAS = (GEMMA, GEMMA2, GEMMA3)
TWO_ROPES = (GEMMA3, OLMO3)  # layers with a window rotate otherwise
_NULL_IS_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # else: the default
_WINDOW = 4096  # of Mistral, OLMo 3 and Gemma 2 and 3, where config.json has no such entry
_PATTERNS = {GEMMA2: 2, GEMMA3: 6, OLMO3: 4}  # every n-th layer has no window

# What a config.json of this architecture may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    GEMMA: {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    GEMMA2: {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    GEMMA3: {
        # the text part of a multimodal checkpoint names only what differs from these
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    MISTRAL: {"num_key_value_heads": 8},
    OLMO2: {"rms_norm_eps": 1e-5},
    OLMO3: {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 2048},
    PHI3: {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    QWEN3: {"head_dim": 128},
    SMOLLM3: {"rope_theta": 2e6, "tie_word_embeddings": True},
}


@dataclass(frozen=True, slots=True)
class LlamaVariant:
    """A member of the family."""

    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    windows: tuple[int, ...]  # per layer; 0: none
    ropes: tuple[Mapping[str, Any] | None, ...]  # per layer, the settings of its rotation; None: no rotation
    mlp_bias: bool = False
    head_norm: bool = False  # q and k are normalised per head
    row_norm: bool = False  # q and k are normalised, each as a whole
    norms_before: bool = True  # attention and feed-forward take normalised hidden states
    norms_after: bool = False  # their results are normalised before they are added
    norm_offset: float = 0.0  # added to the weights of all norms
    fused: bool = False  # q, k and v are one tensor of the checkpoint, gate and up are another
    eps: float = 1e-6
    scale: float | None = None  # of attention's scores; None: by the size of a head
    soft_cap: float = 0.0  # of attention's scores, 0: none
    logits_cap: float = 0.0  # of logits, 0: none
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    logits_scale: float = 1.0


def completed(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content with the architecture's defaults, in one spelling."""
    given = {name: value for name, value in hf.items() if value is not None or name in _NULL_IS_NONE}
    if hf.get("hidden_activation"):
        given["hidden_act"] = hf["hidden_activation"]
    if architecture == PHI3:
        given |= _longrope(given)
    return {**_DEFAULTS.get(architecture, {}), **given}


def _longrope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The first Phi-3 files call it "su" or "yarn"."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    settings = hf.get(name)
    if not isinstance(settings, Mapping) or "short_factor" not in settings:
        return {}
    return {name: {**settings, "rope_type": "longrope"}}


def variant_of(config: ModelConfig) -> LlamaVariant:
    """ModelError where config.json makes no sense, or asks for something that is not known."""
    architecture, hf = config.architecture, config.hf
    if hf.get("use_bidirectional_attention"):
        raise ModelError(
            "config.json has use_bidirectional_attention=true: only causal decoders can generate, this is an encoder"
        )
    gemma = architecture in _GEMMAS
    bias = bool(hf.get("attention_bias", False)) and architecture not in (QWEN2, MISTRAL, PHI3)
    granite = architecture == GRANITE
    return LlamaVariant(
        qkv_bias=bias or architecture == QWEN2,
        output_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)) and architecture in (LLAMA, GRANITE, SMOLLM3),
        head_norm=architecture in (QWEN3, GEMMA3),
        row_norm=architecture in (OLMO2, OLMO3),
        windows=_windows(config),
        ropes=_ropes(config),
        norms_before=architecture not in (OLMO2, OLMO3),
        norms_after=architecture in (OLMO2, OLMO3, GEMMA2, GEMMA3),
        norm_offset=1.0 if gemma else 0.0,
        fused=architecture == PHI3,
        eps=number(hf, "rms_norm_eps", 1e-6),
        scale=_scale(architecture, hf),
        soft_cap=_cap(hf, "attn_logit_softcapping", 50.0 if architecture == GEMMA2 else 0.0),
        logits_cap=_cap(hf, "final_logit_softcapping", 30.0 if architecture == GEMMA2 else 0.0),
        embedding_scale=config.hidden_size**0.5
        if gemma
        else _multiplier(granite, hf, "embedding_multiplier"),
        residual_scale=_multiplier(granite, hf, "residual_multiplier"),
        logits_scale=1.0 / _multiplier(granite, hf, "logits_scaling"),
    )


def _scale(architecture: str, hf: Mapping[str, Any]) -> float | None:
    if architecture in (GEMMA2, GEMMA3):
        return number(hf, "query_pre_attn_scalar", 256) ** -0.5
    return number(hf, "attention_multiplier", 1.0) if architecture == GRANITE else None


def _multiplier(known: bool, hf: Mapping[str, Any], name: str) -> float:
    return number(hf, name, 1.0) if known else 1.0


def _cap(hf: Mapping[str, Any], name: str, default: float) -> float:
    """`default` where config.json says nothing; null: none."""
    if name not in hf:
        return default
    return 0.0 if hf[name] is None else number(hf, name, default)


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """Mistral and Phi-3 have one window everywhere; Qwen only where it is switched on, and then from a layer on; Gemma
    2 and 3 and OLMo 3 in most layers; SmolLM3 in those without rotation."""
    architecture, hf = config.architecture, config.hf
    if architecture == MISTRAL or (architecture == PHI3 and hf.get("sliding_window")):
        return (_window(hf),) * config.num_layers
    if architecture in _PATTERNS:
        return windows_by_kind(config, _PATTERNS[architecture])
    if not (architecture in (QWEN2, QWEN3, SMOLLM3) and hf.get("use_sliding_window", False)):
        return (0,) * config.num_layers
    if hf.get("layer_types") is not None:
        return windows_by_kind(config)
    window = _window(hf)
    if architecture == SMOLLM3:
        return tuple(0 if rotates else window for rotates in _rotating(config))
    first = whole(hf, "max_window_layers", 28)
    return tuple(window if layer >= first else 0 for layer in range(config.num_layers))


def windows_by_kind(config: ModelConfig, pattern: int = 1) -> tuple[int, ...]:
    """Of the layers that `layer_types` lists; without such a list, of all but every `pattern`-th."""
    hf, window = config.hf, _window(config.hf)
    kinds = hf.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != config.num_layers:
            raise ModelError(
                f"config.json has layer_types={kinds!r}: it must list {config.num_layers} layers"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    pattern = positive(hf, "sliding_window_pattern", pattern)
    return tuple(window if (layer + 1) % pattern else 0 for layer in range(config.num_layers))


def _window(hf: Mapping[str, Any]) -> int:
    """0 or null: none."""
    return whole(hf, "sliding_window", 0) if "sliding_window" in hf else _WINDOW


def _rotating(config: ModelConfig) -> tuple[bool, ...]:
    """Which layers of a SmolLM3 rotate q and k: config.json has a 1 for these in `no_rope_layers`."""
    listed = config.hf.get("no_rope_layers")
    if listed is None:
        interval = positive(config.hf, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(config.num_layers))
    if not isinstance(listed, list) or len(listed) < config.num_layers:
        raise ModelError(
            f"config.json has no_rope_layers={listed!r}: it must list {config.num_layers} layers"
        )
    return tuple(bool(rotates) for rotates in listed[: config.num_layers])


def _ropes(config: ModelConfig) -> tuple[Mapping[str, Any] | None, ...]:
    hf = config.hf
    if config.architecture == SMOLLM3:
        return tuple(hf if rotates else None for rotates in _rotating(config))
    if config.architecture not in TWO_ROPES:
        return (hf,) * config.num_layers
    everywhere, inside = ropes_by_kind(config.architecture, hf)
    return tuple(inside if window else everywhere for window in _windows(config))


def ropes_by_kind(architecture: str, hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings of the layers that see everything, and of those with a window: Gemma 3 has another base there, OLMo 3
    the same one without scaling."""
    limit = {"max_position_embeddings": hf.get("max_position_embeddings")}
    base = number(hf, "rope_theta", 1e6)
    by_kind = hf.get("rope_parameters")
    if isinstance(by_kind, Mapping) and "full_attention" in by_kind:
        full, sliding = by_kind["full_attention"], by_kind.get("sliding_attention")
        local = {"rope_theta": base} if architecture == OLMO3 else {}
        everywhere = {**limit, "rope_theta": base, "rope_parameters": full}
        return everywhere, {**limit, **local, "rope_parameters": sliding}
    local_base = base if architecture == OLMO3 else number(hf, "rope_local_base_freq", 1e4)
    return {"rope_theta": 1e6, **hf}, {**limit, "rope_theta": local_base}
