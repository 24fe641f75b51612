"""Small GGUF files for tests, written with the gguf library as llama.cpp's converter would."""

import base64
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LLAMA_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_NAMES = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """What the converter calls a Hugging Face tensor."""
    gpt2 = name.startswith("transformer.")
    table = GPT2_NAMES if gpt2 else LLAMA_NAMES
    if name in table:
        return table[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{table[stem]}.{suffix}"


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows reordered for rope over neighbouring pairs, head by head."""
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, 2, half, -1).transpose(1, 2).reshape(tensor.shape)


def write(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    quantization: gguf.GGMLQuantizationType | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """`keys` go below the architecture's prefix, `extra` as they are; `tensors` have GGUF's names."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in keys.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (extra or {}).items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        array = tensor.detach().float().numpy()
        if quantization is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    for name, (array, kind) in (raw or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


LLAMA_KEYS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def bare_llama(path: Path, *, keys: dict[str, Any] | None = None, **more: Any) -> Path:
    """The smallest file that opens: hyperparameters and an embedding."""
    tensors = {"token_embd.weight": torch.arange(320.0).reshape(10, 32), **more.pop("tensors", {})}
    return write(path, "llama", {**LLAMA_KEYS, **(keys or {})}, tensors, **more)


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def roberta_tokenizer(lines: list[str]) -> transformers.RobertaTokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    inner.train_from_iterator(lines, trainer)
    learnt = json.loads(inner.to_str())["model"]
    return transformers.RobertaTokenizer(learnt["vocab"], [tuple(pair) for pair in learnt["merges"]])


def xlmr_tokenizer(lines: list[str]) -> transformers.XLMRobertaTokenizer:
    """Its table folds tabs and line ends to spaces, and two letters to others."""
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator(lines, trainer)
    learnt = json.loads(inner.to_str())["model"]["vocab"]
    # GGUF keeps float32, in which equal cuts may differ in the last bit
    vocabulary = [(token, float(np.float32(score))) for token, score in learnt]
    table = folding_table({"\n": " ", "\t": " ", "\r": " ", "ß": "ss", "Å": "a"})
    return transformers.XLMRobertaTokenizer(vocabulary, _spm_precompiled_charsmap=table)


def folding_table(folds: dict[str, str]) -> bytes:
    """SentencePiece's precompiled_charsmap: a double array of units for the keys' bytes, then the values."""
    units = dict.fromkeys(range(256 * 2 * sum(len(key.encode()) + 1 for key in folds)), 0)
    values, bases = b"", {b"": 256}
    units[0] = 256 << 10
    for key, value in folds.items():
        encoded = key.encode()
        for end in range(1, len(encoded) + 1):
            before, byte = bases[encoded[: end - 1]], encoded[end - 1]
            base = bases.setdefault(encoded[:end], 256 * (len(bases) + 1))
            units[before ^ byte] |= byte | (((before ^ byte) ^ base) << 10)
        units[before ^ byte] |= 1 << 8
        units[base] = 1 << 31 | len(values)
        values += value.encode() + b"\0"
    array = np.array(list(units.values()), np.uint32).tobytes()
    return np.uint32(len(array)).tobytes() + array + values


def tokenizer_metadata(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """As the converter writes the tokenizers of RoBERTa and XLM-R."""
    tokenizer.save_pretrained(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    tokens = [tokenizer.convert_ids_to_tokens(index) for index in range(len(tokenizer))]
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(tokens))
    facts = {
        "tokens": tokens,
        "token_type": [2 if token == "<unk>" else 3 if token in SPECIAL else 1 for token in tokens],
        **{f"add_{name}_token": added for name, added in special.add_special_token.items()},
    }
    spelled = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
    ids = special.special_token_ids
    facts |= {f"{spelled.get(name, name)}_token_id": token_id for name, token_id in ids.items()}
    if document["model"]["type"] == "BPE":
        facts |= {"model": "gpt2", "pre": "roberta-bpe", "merges": special.merges}
        facts["token_type"][SPECIAL.index("<unk>")] = 3
    else:
        table = base64.b64decode(document["normalizer"]["precompiled_charsmap"])
        facts |= {"model": "t5", "pre": "default", "precompiled_charsmap": list(table)}
        facts["scores"] = [score for _, score in document["model"]["vocab"]]
        facts |= {"add_space_prefix": True, "remove_extra_whitespaces": True}
    return {"general.architecture": "bert"} | {
        f"tokenizer.ggml.{name}": value for name, value in facts.items()
    }
