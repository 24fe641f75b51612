"""A Q4_K_M file of Qwen2.5-1.5B's shape with random weights, and Quire beside llama.cpp on it.

    python -m quire_lab.benchmarks.large_gguf [--file FILE] [--layers 28] [--make-only] [-- --rounds 3 …]

The file is made once, of the types that llama.cpp's Q4_K_M has: Q6_K for the tied token table, for values and for the
down projection of every second layer, Q4_K for the rest. The comparison is compare_cpu's, with 1 and 8 requests; what
follows `--` is given to it. `start_s` is a first start, since nothing of a GGUF file with native blocks is cached, and
`peak_rss_mb` is the whole process, Python and torch included.
"""

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

from quire_lab.benchmarks.compare_cpu.__main__ import ROOT
from quire_lab.benchmarks.compare_cpu.__main__ import main as compare

ARCHITECTURE = "qwen2"
WIDTH, FEED_FORWARD, KV_WIDTH, VOCABULARY = 1536, 8960, 256, 151936
KEYS = {
    "context_length": 32768,
    "embedding_length": WIDTH,
    "feed_forward_length": FEED_FORWARD,
    "attention.head_count": 12,
    "attention.head_count_kv": 2,
}
MATRICES = {  # rows and columns
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (KV_WIDTH, WIDTH),
    "attn_v": (KV_WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (FEED_FORWARD, WIDTH),
    "ffn_up": (FEED_FORWARD, WIDTH),
    "ffn_down": (WIDTH, FEED_FORWARD),
}
Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K


def random_blocks(
    rng: np.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType
) -> np.ndarray:
    """uint8 [rows, bytes]: weights of about the size that a trained model of this width has."""
    columns_per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // columns_per_block, block_bytes), dtype=np.uint8)
    if kind == Q4_K:  # scales of 0 to 63 times codes of 0 to 15, less minimums of 0 to 63
        scales = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)
        blocks[..., :4] = scales
    else:  # scales of -128 to 127 times codes of -32 to 31
        blocks[..., 208:] = np.array([2e-5], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_file(path: Path, layers: int) -> None:
    """The whole model; its tokenizer has a token per number and no merges that matter."""
    rng = np.random.default_rng(0)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), ARCHITECTURE)
    writer.add_uint32(f"{ARCHITECTURE}.block_count", layers)
    for key, value in KEYS.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", value)
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", 1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, VOCABULARY))])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_tensor("token_embd.weight", random_blocks(rng, VOCABULARY, WIDTH, Q6_K), raw_dtype=Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(layers):
        prefix = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}.{norm}.weight", np.ones(WIDTH, np.float32))
        for name, (rows, columns) in MATRICES.items():
            kind = Q6_K if name in ("attn_v", "ffn_down") and layer % 2 == 0 else Q4_K
            writer.add_tensor(
                f"{prefix}.{name}.weight", random_blocks(rng, rows, columns, kind), raw_dtype=kind
            )
            if name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"{prefix}.{name}.bias", np.zeros(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def main() -> int:
    """Makes the file if it is not there, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--file", type=Path, default=ROOT / "build" / "qwen2-1.5b-random.Q4_K_M.gguf")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--make-only", action="store_true", help="do not compare")
    parser.add_argument("compare", nargs="*", help="for compare_cpu, after --")
    args = parser.parse_args()
    if not args.file.exists():
        args.file.parent.mkdir(parents=True, exist_ok=True)
        write_file(args.file, args.layers)
    print(f"{args.file.name}: {args.file.stat().st_size / 1e6:.0f} MB", flush=True)
    if args.make_only:
        return 0
    defaults = ["--engines", "quire", "llamacpp", "--n", "1", "8", "--rounds", "3", "--repeats", "2"]
    output = ["--output", str(ROOT / "benchmarks" / "results" / "cpu_large_gguf.json")]
    return compare(["--model", str(args.file), *defaults, *output, *args.compare])


if __name__ == "__main__":
    sys.exit(main())
