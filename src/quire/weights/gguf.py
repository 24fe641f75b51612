"""GgufSource: weights, config, tokenizer and template from one GGUF file, under a Hugging Face checkpoint's names."""

import difflib
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import ModelError, WeightsError
from quire.kernels.cache_files import write_whole
from quire.kernels.native import default_num_threads
from quire.quant.encoded import Encoded, Weight
from quire.quant.gguf_blocks import KINDS, GgufBlocks
from quire.weights.cache import tokenizers_folder
from quire.weights.experts import split_gguf
from quire.weights.gguf_decoders import (
    DECODERS,
    DERIVED,
    LLAMA_BLOCK,
    LLAMA_TOP,
    MIXTURES,
    OTHERS,
    PAIRED,
    PREFIXES,
    ROTATED_WHOLE,
    TOPS,
    block_names,
    family_layout,
    partial_rotation,
)
from quire.weights.gguf_file import GgufFile, GgufKeys, StringArray, TensorInfo, text_of, token_id_of
from quire.weights.gguf_tokenizer import VERSION as TOKENIZER_VERSION
from quire.weights.gguf_tokenizer import tokenizer_text

# Bytes from which blocks stay as they are by default: decoding is bound by bytes then, and converting takes long. A
# smaller model is faster in int8 where there are many tokens in a step.
_LARGE = 512 << 20
_DIRECT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 21  # unpacking needs several times a chunk in scratch memory
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # to GGUF's words
_LLAMA3_ORIGINAL_CONTEXT = 8192  # of every Llama 3.x; GGUF keeps only the factors that follow from it
_POOLINGS = {1: "mean", 2: "cls", 3: "last"}
_FLOAT_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


class GgufSource:
    """A Source over one mapped file. Float tensors come as they are, unread, and blocks of known kinds encoded.

    The `gguf` library is needed only while tensors of other kinds are unpacked to float32.
    """

    random = False

    def __init__(self, path: Path, *, name: str | None = None, fingerprint: str | None = None) -> None:
        self._file = GgufFile(path)
        self.name = name or path.name.removesuffix(".gguf")
        self.config: Mapping[str, Any] = hugging_face_config(self._file)
        ends = end_token_ids(self._file.metadata)
        self.generation_config: Mapping[str, Any] = {"eos_token_id": ends} if ends else {}
        self.architecture = str(self._file.metadata["general.architecture"])
        pooling = self._file.metadata.get(f"{self.architecture}.pooling_type", 1)
        self.pooling = _POOLINGS.get(pooling, "mean")  # of an encoder
        self.fingerprint = fingerprint or self._file.fingerprint()
        self._tensors = self._named_tensors()
        self.encodings: Mapping[str, Encoded] = {
            name: Encoded.empty(scheme, (info.shape[0], info.shape[1]))
            for name, info in self._tensors.items()
            if (scheme := self._scheme(info)) is not None
        }
        self.num_tensors = len(self._tensors)
        infos = self._tensors.values()
        self.num_bytes = sum(info.num_bytes for info in infos)
        self.min_bits = min(
            8 * info.num_bytes / math.prod(info.shape) for info in infos if len(info.shape) > 1
        )

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        for name, info in self._tensors.items():
            scheme = self._scheme(info)
            stored = self._unpacked(info) if scheme is None else self._blocks(info, scheme)
            tensor = hugging_face_layout(self.architecture, self.config, info.name, stored)
            shape = (info.shape[0], info.shape[-1])
            yield name, tensor if scheme is None else Encoded(scheme, {"blocks": tensor}, shape)
            self._file.forget()

    def tokenizer_json(self) -> str | None:
        """Built once per file and kept in the cache folder: building takes longer than the rest of opening."""
        if "tokenizer.ggml.tokens" not in self._file.metadata:
            return None
        kept = tokenizers_folder() / f"{self.fingerprint[:32]}-v{TOKENIZER_VERSION}.json"
        try:
            return kept.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = tokenizer_text(self._file.metadata)
            with suppress(OSError):  # a cache that cannot be written is no reason to fail
                write_whole(kept, text)
            return text

    def tokenizer_config(self) -> Mapping[str, Any]:
        metadata = self._file.metadata
        config: dict[str, Any] = {}
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, StringArray):
            ids = {word: token_id_of(metadata, key) for word, key in _SPECIAL_TOKENS.items()}
            texts = tokens.pick({token_id for token_id in ids.values() if token_id is not None})
            config = {f"{word}_token": texts[token_id] for word, token_id in ids.items() if token_id in texts}
        template = text_of(metadata, "tokenizer.chat_template")
        if template is not None:
            config["chat_template"] = template
        named = metadata.get("tokenizer.chat_templates")
        if isinstance(named, StringArray) and template is not None:
            others = {name: text_of(metadata, f"tokenizer.chat_template.{name}") for name in named}
            templates = {"default": template, **{name: text for name, text in others.items() if text}}
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        return config

    def _named_tensors(self) -> dict[str, TensorInfo]:
        named: dict[str, TensorInfo] = {}
        for info in self._file.tensors.values():
            experts = split_gguf(self.config, info)
            if experts is not None:
                named |= experts
            elif (name := hugging_face_name(self.architecture, info.name, self.config)) is not None:
                named[name] = info
        return named

    def _scheme(self, info: TensorInfo) -> GgufBlocks | None:
        """How the rows of a matrix stay encoded; None: they are floats, or become floats."""
        transposed = self.architecture == "gpt2"  # blocks lie along the wrong dimension there
        if info.type_name not in KINDS or len(info.shape) != 2 or transposed:
            return None
        return GgufBlocks(info.type_name)

    def _blocks(self, info: TensorInfo, scheme: GgufBlocks) -> Tensor:
        """uint8 [rows, blocks, bytes], a view of the file."""
        flat = torch.frombuffer(self._file.buffer, dtype=torch.uint8, count=info.num_bytes, offset=info.start)
        blocks = flat.view(info.shape[0], -1, scheme.block_bytes)
        try:
            scheme.check(blocks)
        except WeightsError as error:
            raise WeightsError(f"{self._file.path}: tensor {info.name}: {error}") from error
        return blocks

    def _unpacked(self, info: TensorInfo) -> Tensor:
        direct = _DIRECT.get(info.type_name)
        if direct is not None:
            count = info.num_bytes // direct.itemsize
            flat = torch.frombuffer(self._file.buffer, dtype=direct, count=count, offset=info.start)
            return flat.reshape(info.shape)
        unpacked = _dequantized(self._file.raw(info), info, self._file.path)
        return torch.from_numpy(unpacked).reshape(info.shape)


def _dequantized(raw: np.ndarray, info: TensorInfo, path: Path) -> np.ndarray:
    """float32 [rows, columns] from packed rows, a few rows at a time per core: scratch memory stays small."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise WeightsError(
            f"{path}: unpacking {info.type_name} needs the gguf library: pip install gguf"
        ) from error
    columns = info.shape[-1]
    unpacked = np.empty((raw.shape[0], columns), dtype=np.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))

    def unpack(first: int) -> None:
        unpacked[first : first + step] = dequantize(raw[first : first + step], kind)

    try:
        kind = GGMLQuantizationType(info.type_id)
        with ThreadPoolExecutor(default_num_threads()) as threads:  # numpy releases the interpreter's lock
            list(threads.map(unpack, range(0, raw.shape[0], step)))
    except (NotImplementedError, ValueError) as error:
        raise WeightsError(
            f"{path}: tensor {info.name!r} is {info.type_name}, which the gguf library cannot unpack: "
            "use a file in another quantization, such as Q8_0 or Q4_K_M"
        ) from error
    return unpacked


# ---------------------------------------------------------------------- Hugging Face's names and layouts


def hugging_face_config(file: GgufFile) -> dict[str, Any]:
    """config.json's content; raises ModelError for an architecture or a variant that is not known here."""
    metadata = file.metadata
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        close = [name for name in ARCHITECTURES if architecture.startswith(name)]  # t5encoder
        close = close or difflib.get_close_matches(architecture, sorted(ARCHITECTURES), 1, cutoff=0.7)
        nearest = f"the nearest is {close[0]}; " if close else ""
        raise ModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not known here: {nearest}known are {known}"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{file.path}: one of {metadata['split.count']} parts of a split GGUF: "
            "join them first with `llama-gguf-split --merge`"
        )
    keys = GgufKeys(file, architecture)
    config = OTHERS[architecture](keys) if architecture in OTHERS else _family(keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: no tensor 'token_embd.weight': this is not a whole language model")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["dtype"] = _dtype(file)
    blocks = (
        tensor for tensor in file.tensors.values() if len(tensor.shape) == 2 and tensor.type_name in KINDS
    )
    large = sum(tensor.num_bytes for tensor in blocks) >= _LARGE
    # Of experts, only int8 on a CPU and 16 bits on a GPU have grouped GEMMs.
    if (
        large
        and architecture not in ("gpt2", "bert", "modern-bert")
        and f"{architecture}.expert_count" not in metadata
    ):
        config["quantization_config"] = {"quant_method": "gguf"}
    for word in ("bos", "eos"):
        config[f"{word}_token_id"] = token_id_of(metadata, word)
    return config


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: end of text and, where the file names it, end of turn."""
    names = ("eos", "eot", "eom")
    found = (token_id_of(metadata, name) for name in names)
    return list(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _decoder(keys: GgufKeys) -> dict[str, Any]:
    """What most decoders have in common."""
    hidden, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    head_dim = keys.number("attention.key_length", hidden // heads if heads else 0)
    rotated = keys.number("rope.dimension_count", head_dim)
    partial = keys.architecture not in ROTATED_WHOLE and rotated < head_dim
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.number(key, head_dim) != head_dim and not (partial and key.startswith("rope")):
            raise keys.error(f"{keys.architecture}.{key}={keys.get(key)} differs from the head's {head_dim}")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.number(
            "attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon")
        ),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, head_dim),
        "hidden_act": "silu",
        **({"partial_rotary_factor": partial_rotation(rotated, head_dim)} if partial else {}),
    }


def _family(keys: GgufKeys) -> dict[str, Any]:
    if keys.get("expert_count") and keys.architecture not in MIXTURES:
        raise keys.error(f"{keys.get('expert_count')} experts per layer: not known of {keys.architecture}")
    architecture, model_type, other = DECODERS[keys.architecture]
    basic = _decoder(keys)
    return {"architectures": [architecture], "model_type": model_type, **basic, **other(keys, basic)}


ARCHITECTURES = frozenset((*OTHERS, *DECODERS))


def _rope_scaling(keys: GgufKeys, head_dim: int) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type") or "none"
    if "rope_freqs.weight" in keys.file.tensors:
        return _llama3_scaling(keys, head_dim)
    linear = keys.number("rope.scale_linear", 1.0)  # how files of 2023 spell it
    if kind == "none":
        return {"rope_type": "linear", "factor": linear} if linear != 1.0 else None
    if kind not in ("linear", "yarn"):
        raise keys.error(f"rope scaling {kind!r} is not known here: known are none, linear, yarn")
    factor = float(keys.number("rope.scaling.factor"))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = int(original)
        names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        for ours, theirs in names.items():
            if keys.get(f"rope.scaling.yarn_{theirs}") is not None:
                scaling[ours] = keys.number(f"rope.scaling.yarn_{theirs}")
        if keys.get("rope.scaling.attn_factor") is not None:
            # GGUF multiplies yarn's own attention factor by this one; config.json holds the product.
            own = 0.1 * math.log(factor) + 1.0
            scaling["attention_factor"] = own * keys.number("rope.scaling.attn_factor")
    return scaling


def _llama3_scaling(keys: GgufKeys, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling from `rope_freqs.weight`, which holds only its effect: a divisor per frequency."""
    divisors = keys.floats("rope_freqs.weight")
    assert divisors is not None
    scaling = {
        "rope_type": "llama3",
        "factor": float(round(float(divisors.max()), 3)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
    }
    expected = llama3_divisors(scaling, keys.number("rope.freq_base", 10000.0), head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise keys.error(
            "the frequencies in rope_freqs.weight are not Llama 3's: use the Hugging Face folder instead"
        )
    return scaling


def llama3_divisors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """By how much Llama 3's rope scaling divides each of the head's base frequencies: [head_dim / 2]."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _dtype(file: GgufFile) -> str:
    """The floating type that the matrices unpack to; packed types unpack to float32."""
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _FLOAT_DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def hugging_face_name(architecture: str, name: str, config: Mapping[str, Any]) -> str | None:
    """The canonical name; None for a tensor that no checkpoint has; ModelError for an unknown one."""
    stem, _, suffix = name.rpartition(".")
    if config.get("model_type") == "distilbert":
        architecture = "distilbert"
    top, block = TOPS.get(architecture, LLAMA_TOP), block_names(architecture, config)
    if architecture != "gpt2":  # which has none of Llama's names
        block = {**LLAMA_BLOCK, **block}
    half, _, rest = stem.partition("blk.")  # T5 has "enc." and "dec." in front
    prefix = PREFIXES.get(half or architecture, "model.layers")
    if stem.split(".")[-1] in DERIVED:
        return None
    if stem in top:
        return f"{top[stem]}.{suffix}"
    layer, _, part = rest.partition(".")
    if layer.isdecimal() and half + part in block:
        return f"{prefix}.{int(layer)}.{block[half + part]}.{suffix}"
    raise ModelError(
        f"GGUF tensor {name!r} is not one that a {architecture} model has here: the variant is not supported"
    )


def hugging_face_layout(architecture: str, config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Undoes what the conversion to GGUF did to a tensor's rows; `name` is GGUF's."""
    part = name.removeprefix("blk.").partition(".")[2].rpartition(".")[0]
    if architecture in PAIRED and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return _halves_from_pairs(tensor, heads)
    if (
        architecture == "gpt2"
        and tensor.dim() == 2
        and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    ):
        return tensor.t()  # a GPT-2 checkpoint keeps these as [in, out]
    return family_layout(architecture, config, part, name, tensor)


def _halves_from_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows for rope over (2i, 2i+1) become rows for rope over (i, i + half), head by head."""
    half = tensor.shape[0] // num_heads // 2
    if num_heads * half * 2 != tensor.shape[0]:
        raise ModelError(
            f"a GGUF tensor of {tensor.shape[0]} rows is not made of {num_heads} attention heads"
        )
    return tensor.unflatten(0, (num_heads, half, 2)).transpose(1, 2).reshape(tensor.shape)
