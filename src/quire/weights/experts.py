"""Experts in checkpoints: tensors that hold one matrix of all experts of a layer become one tensor per expert.

transformers writes one per expert unless it is told otherwise; `save_original_format=False` and GGUF stack them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.core.errors import WeightsError
from quire.weights.gguf_file import GgufKeys, TensorInfo

GPT_OSS, MIXTRAL, OLMOE = "GptOssForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM"
_STACKED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)$")
_MIXTRAL_ROUTER = re.compile(r"(.*\.)mlp\.gate\.weight$")
_GGUF_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight$")
_GGUF_ROUTER = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight$")
_GGUF_SHARED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_shexp\.weight$")
_GGUF_SHARED_GATE = re.compile(r"blk\.(\d+)\.ffn_gate_inp_shexp\.weight$")
_MIXTRAL_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


def expert_name(layer: str, expert: int, matrix: str, mixtral: bool) -> str:
    """The canonical name; `layer` is a prefix such as "model.layers.0.", `matrix` gate, up or down."""
    if mixtral:
        return f"{layer}block_sparse_moe.experts.{expert}.{_MIXTRAL_MATRICES[matrix]}.weight"
    return f"{layer}mlp.experts.{expert}.{matrix}_proj.weight"


def num_pieces(name: str, shape: Sequence[int]) -> int:
    """Tensors that `split` makes of this one."""
    match = _STACKED.match(name)
    if match is None or len(shape) != 3:
        return 1
    return shape[0] * (2 if match[2] == "gate_up_proj" else 1)


def split(config: Mapping[str, Any], name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensor under canonical names: one per expert where it holds the matrices of all."""
    mixtral = MIXTRAL in (config.get("architectures") or ())
    match, router = _STACKED.match(name), _MIXTRAL_ROUTER.match(name)
    if mixtral and router:
        yield f"{router[1]}block_sparse_moe.gate.weight", tensor
    elif match is None or tensor.dim() != 3 or GPT_OSS in (config.get("architectures") or ()):
        yield name, tensor  # gpt-oss has its matrices transposed, and takes them as they are
    else:
        _checked_count(config, name, tensor.shape)
        matrices = ("gate", "up") if match[2] == "gate_up_proj" else ("down",)
        for expert, rows in enumerate(tensor.unbind(0)):
            for matrix, part in zip(matrices, rows.chunk(len(matrices)), strict=True):
                yield expert_name(match[1], expert, matrix, mixtral), part


def split_gguf(config: Mapping[str, Any], info: TensorInfo) -> dict[str, TensorInfo] | None:
    """The same for a GGUF tensor of a mixture; None: it is none that only mixtures have."""
    mixtral = MIXTRAL in config["architectures"]
    if match := _GGUF_STACKED.match(info.name):
        count = _checked_count(config, info.name, info.shape)
        size = info.num_bytes // count
        return {
            expert_name(_layer(match), expert, match[2], mixtral): replace(
                info, shape=info.shape[1:], start=info.start + expert * size, num_bytes=size
            )
            for expert in range(count)
        }
    if match := _GGUF_ROUTER.match(info.name):
        return {f"{_layer(match)}{'block_sparse_moe' if mixtral else 'mlp'}.gate.weight": info}
    if match := _GGUF_SHARED.match(info.name):
        return {f"{_layer(match)}mlp.shared_expert.{match[2]}_proj.weight": info}
    if match := _GGUF_SHARED_GATE.match(info.name):
        row = replace(info, shape=(1, info.shape[-1]))  # converters drop the dimension of one
        return {f"{_layer(match)}mlp.shared_expert_gate.weight": row}
    return None


def _checked_count(config: Mapping[str, Any], name: str, shape: Sequence[int]) -> int:
    """How many experts the tensor holds, which is what config.json says."""
    expected = config.get("num_local_experts") or config.get("num_experts")
    if len(shape) != 3 or shape[0] < 1 or (expected is not None and shape[0] != expected):
        raise WeightsError(
            f"tensor {name} is {list(shape)} where the config asks for {expected} experts: use an undamaged copy of "
            "the model"
        )
    return shape[0]


def _layer(match: re.Match[str]) -> str:
    return f"model.layers.{int(match[1])}."


def gguf_mixture(keys: GgufKeys, architecture: str, renormalize: bool) -> dict[str, Any]:
    """config.json's values of the experts. Sizes are the tensors': files name them in several ways, or not at all.

    `renormalize`: what the architecture does where the metadata says nothing.
    """
    tensors = keys.file.tensors
    stated = keys.get("expert_weights_norm")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "num_local_experts" if architecture in (MIXTRAL, GPT_OSS) else "num_experts": keys.number(
            "expert_count"
        ),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "norm_topk_prob": renormalize if stated is None else bool(stated),
    }
    layers = [(i, tensors.get(f"blk.{i}.ffn_gate_exps.weight")) for i in range(keys.number("block_count"))]
    inner = next((info.shape[1] for _, info in layers if info is not None and len(info.shape) == 3), None)
    if inner is not None:
        sole = architecture in (MIXTRAL, OLMOE, GPT_OSS)  # whose every layer has experts
        config["intermediate_size" if sole else "moe_intermediate_size"] = inner
    config["mlp_only_layers"] = [i for i, info in layers if info is None]
    shared = next((info for name, info in tensors.items() if name.endswith("ffn_gate_shexp.weight")), None)
    if shared is not None:
        config["shared_expert_intermediate_size"] = shared.shape[0]
    return config
