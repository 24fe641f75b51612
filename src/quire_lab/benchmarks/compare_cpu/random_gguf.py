"""A GGUF file of a published shape with random weights, as llama.cpp's converter writes it: to compare speeds."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Gemma 3 270M: of its parameters, 63 % are the vocabulary's.
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 18, 640, 2048, 4, 1, 256, 262_144
KEYS: dict[str, int | float] = {
    "block_count": LAYERS,
    "context_length": 32_768,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 512,
    "rope.freq_base": 1e6,
}
BLOCK = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
NORMS = {
    **dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), HIDDEN),
    **dict.fromkeys(("attn_q_norm", "attn_k_norm"), HEAD_DIM),
}


def gemma3_270m(folder: Path, kind: str = "Q8_0", seed: int = 0) -> Path:
    """The path of the file, which is made where there is none."""
    path = folder / f"gemma-3-270m-random.{kind}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(str(unfinished), "gemma3")
    for key, value in KEYS.items():
        add: Any = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"gemma3.{key}", value)
    _add_tokenizer(writer)
    chance = np.random.default_rng(seed)
    encoding = gguf.GGMLQuantizationType[kind]

    def add_matrix(name: str, shape: tuple[int, int]) -> None:
        drawn = chance.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(drawn, encoding), raw_dtype=encoding)

    add_matrix("token_embd", (VOCAB, HIDDEN))
    for layer in range(LAYERS):
        for name, shape in BLOCK.items():
            add_matrix(f"blk.{layer}.{name}", shape)
        for name, size in NORMS.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Four special tokens, every byte, and pieces that cannot be merged: prompts are token ids."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [chr(0x20000 + index) for index in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * (VOCAB - 260)])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
