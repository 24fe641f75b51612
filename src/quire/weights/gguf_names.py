"""GGUF tensor names and layouts -> those of Hugging Face checkpoints."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.core.errors import ModelError

_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_DERIVED = ("rope_freqs", "attn_rot_embd")  # follow from the config; no checkpoint has them


def hugging_face_name(architecture: str, name: str) -> str | None:
    """The canonical name; None for a tensor that no checkpoint has; ModelError for one that nobody expects."""
    stem, _, suffix = name.rpartition(".")
    top, block, prefix = _LLAMA_TOP, _LLAMA_BLOCK, "model.layers"
    if architecture == "gpt2":
        top, block, prefix = _GPT2_TOP, _GPT2_BLOCK, "transformer.h"
    if stem.split(".")[-1] in _DERIVED:
        return None
    if stem in top:
        return f"{top[stem]}.{suffix}"
    head, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if head == "blk" and part in block:
        return f"{prefix}.{int(layer)}.{block[part]}.{suffix}"
    raise ModelError(
        f"GGUF tensor {name!r} is not one that a {architecture} model has here: the variant is not supported"
    )


def hugging_face_layout(architecture: str, config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Undoes what the conversion to GGUF did to a tensor's rows; `name` is GGUF's."""
    part = name.removeprefix("blk.").partition(".")[2].rpartition(".")[0]
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return _halves_from_pairs(tensor, heads)
    if (
        architecture == "gpt2"
        and tensor.dim() == 2
        and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    ):
        return tensor.t()  # a GPT-2 checkpoint keeps these as [in, out]
    return tensor


def _halves_from_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows for rope over (2i, 2i+1) become rows for rope over (i, i + half), head by head."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.unflatten(0, (num_heads, half, 2)).transpose(1, 2).reshape(tensor.shape)
