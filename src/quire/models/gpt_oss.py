"""gpt-oss: the Llama decoder with attention sinks, a window in every second layer, and experts with biases."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError, WeightsError
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.layers.moe import MixtureNames, MixtureOfExperts, MixtureShape
from quire.layers.parameters import Loader, Table
from quire.models import llama
from quire.models.llama import Llama, LlamaLayer
from quire.models.llama_variants import LlamaVariant, windows_by_kind
from quire.models.mixture import MAX_EXPERTS, MixtureLayer
from quire.quant.encoded import Weight, floats
from quire.quant.experts import DOWN, GATE_UP
from quire.weights.hyperparameters import number, positive

# What a config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
# MXFP4: 4-bit floats in blocks of 32 that share a power of two
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32


def describe(architecture: str, given: Mapping[str, Any]) -> ModelConfig:
    hf = {**_DEFAULTS, **{name: value for name, value in given.items() if value is not None}}
    if "rope_parameters" in hf:
        del hf["rope_scaling"]
    quantization = hf.pop("quantization_config", None)  # experts are decoded when they are loaded
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method not in (None, "mxfp4"):
        raise ModelError(
            f"weights of {architecture} quantized with {method!r} cannot be loaded: known is mxfp4"
        )
    hf["mxfp4"] = method is not None
    config = llama.describe(architecture, hf)
    shape = mixture_shape(config)
    if hf["mxfp4"] and (shape.hidden % BLOCK or shape.inner % BLOCK):
        raise ModelError(
            f"MXFP4 has blocks of {BLOCK} numbers, which do not divide hidden_size={shape.hidden} and "
            f"intermediate_size={shape.inner}: correct config.json"
        )
    return replace(config, windows=windows_by_kind(config, 2))


def mixture_shape(config: ModelConfig) -> MixtureShape:
    hf = config.hf
    num_experts = positive(hf, "num_local_experts", high=MAX_EXPERTS)
    return MixtureShape(
        num_experts=num_experts,
        top_k=positive(hf, "num_experts_per_tok", high=num_experts),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        shared_inner=0,
        renormalize=True,
        clamp=(number(hf, "swiglu_alpha", 1.702), number(hf, "swiglu_limit", 7.0)),
    )


def _variant(config: ModelConfig) -> LlamaVariant:
    bias = bool(config.hf.get("attention_bias", True))
    return LlamaVariant(
        qkv_bias=bias,
        output_bias=bias,
        windows=config.windows,
        ropes=(config.hf,) * config.num_layers,
        eps=number(config.hf, "rms_norm_eps", 1e-5),
    )


class GptOssLayer(MixtureLayer):
    """Attention with a sink in each head, then experts."""

    def _make_feed_forward(self, config: ModelConfig, variant: LlamaVariant, factory: LayerFactory) -> None:
        self._mxfp4, self._gguf = bool(config.hf["mxfp4"]), bool(config.hf.get("gguf_experts", False))
        self._shape = mixture_shape(config)
        self.sinks = Table((config.num_heads,), torch.float32, factory.device)
        self.mixture = MixtureOfExperts(factory, self._shape)

    def attend(self, hidden: Tensor, batch: Batch, pool: Pool) -> Tensor:
        qkv = self.qkv.normed(hidden, self.input_norm, batch.lora)
        return self.attention(qkv, batch, pool, sinks=self.sinks.value)

    def _feed_forward_loaders(self, prefix: str) -> dict[str, Loader]:
        shape, mlp = self._shape, f"{prefix}mlp."
        if self._gguf:
            return {
                f"{prefix}self_attn.sinks.weight": self.sinks.loader(),
                **self.mixture.loaders(prefix, MixtureNames("mlp.")),
                **self.mixture.split_bias_loaders(f"{mlp}experts."),
            }
        experts = f"{mlp}experts."
        loaders = {
            f"{prefix}self_attn.sinks": self.sinks.loader(),
            **self.mixture.router_loaders(f"{mlp}router"),
            **self.mixture.bias_loaders(f"{experts}gate_up_proj_bias", f"{experts}down_proj_bias"),
        }
        sizes = ((GATE_UP, shape.hidden, 2 * shape.inner), (DOWN, shape.inner, shape.hidden))
        for matrix, num_inputs, num_outputs in sizes:
            name = f"{experts}{matrix}_proj"
            if self._mxfp4:
                loaders |= self._encoded_loaders(name, matrix, num_inputs, num_outputs)
            else:
                size = (shape.num_experts, num_inputs, num_outputs)
                loaders[name] = Loader(size, partial(self._take, matrix))
        return loaders

    def _take(self, matrix: str, weights: Weight) -> None:
        """All experts in one tensor [E, inputs, outputs]."""
        for expert, columns in enumerate(floats(weights)):
            self._load(expert, matrix, columns.t())

    def _load(self, expert: int, matrix: str, rows: Tensor) -> None:
        """Rows of gate and up take turns in a checkpoint."""
        rows = torch.cat((rows[::2], rows[1::2])) if matrix == GATE_UP else rows
        self.mixture.load_expert(expert, matrix, rows.contiguous())

    def _encoded_loaders(
        self, name: str, matrix: str, num_inputs: int, num_outputs: int
    ) -> dict[str, Loader]:
        """Decodes when both tensors are there, which may come in any order."""
        parts: dict[str, Tensor] = {}

        def keep(kind: str, tensor: Weight) -> None:
            if not isinstance(tensor, Tensor) or tensor.dtype is not torch.uint8:
                raise WeightsError(
                    "MXFP4 is stored as uint8: take the config.json that belongs to these weights"
                )
            parts[kind] = tensor
            if len(parts) == 2:
                blocks, scales = parts.pop("blocks"), parts.pop("scales")
                for expert in range(len(blocks)):
                    self._load(expert, matrix, decode_mxfp4(blocks[expert], scales[expert]))

        size = (self._shape.num_experts, num_outputs, num_inputs // BLOCK)
        return {
            f"{name}_blocks": Loader((*size, BLOCK // 2), partial(keep, "blocks")),
            f"{name}_scales": Loader(size, partial(keep, "scales")),
        }


class GptOss(Llama):
    """Layers of GptOssLayer on the Llama decoder."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        self.mixture = mixture_shape(config)
        super().__init__(config, factory, _variant(config))

    @property
    def recordable(self) -> bool:
        return False  # torch clamps what experts compute, which a tape cannot record

    def _kind(self, index: int) -> type[LlamaLayer]:
        return GptOssLayer


build = GptOss


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [rows, n, 16] uint8, two numbers a byte, the lower half first; scales [rows, n] uint8, exponents plus 127
    -> [rows, 32 n] float32."""
    table = torch.tensor(_FP4, device=blocks.device)
    numbers = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1)
    powers = torch.ldexp(torch.ones((), device=blocks.device), scales.int() - 127)
    return (numbers.flatten(-2) * powers[..., None]).flatten(-2)
