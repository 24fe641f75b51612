"""A GGUF file of every decoder family, written as llama.cpp's converter does, gives the model that was converted."""

import copy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from quire import LLM, Embedder, SamplingParams
from quire.core.errors import ModelError
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.quant.encoded import Encoded, floats
from quire.weights.architectures import KNOWN
from quire.weights.gguf import ARCHITECTURES, GgufSource
from tests.models import checkpoints, encoder_folders, seq2seq
from tests.models.checkpoints import prompts, reference_logits, save
from tests.models.paging import run_chunked
from tests.weights.gguf_writing import permuted, roberta_tokenizer, tokenizer_metadata, write, xlmr_tokenizer

ARCH = gguf.MODEL_ARCH
RMS = "attention.layer_norm_rms_epsilon"
CENTRED = "attention.layer_norm_epsilon"
FAMILIES: dict[str, tuple[gguf.MODEL_ARCH, transformers.PreTrainedConfig]] = {
    "phi3": (ARCH.PHI3, checkpoints.phi3(sliding_window=9)),
    "phi3-longrope": (ARCH.PHI3, checkpoints.longrope(8, attention_factor=1.25)),
    "phi3-partial": (
        ARCH.PHI3,
        checkpoints.phi3(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75}),
    ),
    "granite": (ARCH.GRANITE, checkpoints.granite(tie_word_embeddings=True)),
    "olmo2": (ARCH.OLMO2, checkpoints.olmo2()),
    "olmo3": (ARCH.OLMO2, checkpoints.olmo3()),
    "olmo3-yarn": (
        ARCH.OLMO2,
        checkpoints.olmo3(rope_parameters=checkpoints.two_ropes(attention_factor=1.3, beta_fast=8.0)),
    ),
    "olmo3-yarn-of-2025": (
        ARCH.OLMO2,
        checkpoints.olmo3(rope_parameters=checkpoints.two_ropes(attention_factor=1.3)),
    ),
    "smollm3": (ARCH.SMOLLM3, checkpoints.smollm3(num_hidden_layers=5, no_rope_layer_interval=4)),
    "gemma": (ARCH.GEMMA, checkpoints.gemma()),
    "gemma2": (ARCH.GEMMA2, checkpoints.gemma2(query_pre_attn_scalar=12)),
    "gemma3": (ARCH.GEMMA3, checkpoints.gemma3(query_pre_attn_scalar=16)),
    "starcoder2": (ARCH.STARCODER2, checkpoints.starcoder2(sliding_window=9)),
    "starcoder2-plain": (ARCH.STARCODER2, checkpoints.starcoder2(use_bias=False, tie_word_embeddings=False)),
    "gptneox": (ARCH.GPTNEOX, checkpoints.neox()),
    "gptneox-one-after-another": (ARCH.GPTNEOX, checkpoints.neox(use_parallel_residual=False)),
    "falcon-7b": (ARCH.FALCON, checkpoints.falcon()),
    "falcon-40b": (ARCH.FALCON, checkpoints.falcon(new_decoder_architecture=True, num_kv_heads=2)),
    "bloom": (ARCH.BLOOM, checkpoints.bloom()),
}


def written(folder: Path, family: str, kind: gguf.GGMLQuantizationType | None = None) -> GgufSource:
    """The checkpoint in the folder, converted."""
    arch, config = FAMILIES[family]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        known = name if arch is not ARCH.BLOOM else name.removeprefix("transformer.")
        new = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        tensors[new] = converted(arch, config, name, tensor)
    tensors |= rope_factors(config)
    name = gguf.MODEL_ARCH_NAMES[arch]
    return GgufSource(write(folder / "m.gguf", name, keys_of(arch, config), tensors, kind))


def converted(arch: gguf.MODEL_ARCH, config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    heads = config.num_attention_heads
    if arch in (ARCH.GRANITE, ARCH.SMOLLM3) and (".q_proj." in name or ".k_proj." in name):
        return permuted(tensor, heads if ".q_proj." in name else config.num_key_value_heads)
    if arch in (ARCH.GEMMA, ARCH.GEMMA2, ARCH.GEMMA3) and name.endswith("norm.weight"):
        return tensor + 1
    if "query_key_value" in name:
        kv_heads = kv_heads_of(config)
        groups = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
        rest = tensor.shape[1:]
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        return torch.cat([part.reshape(-1, *rest) for part in parts])
    return tensor


def kv_heads_of(config: Any) -> int:
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return next(count for name in names if (count := getattr(config, name, None)))


def rope_factors(config: Any) -> dict[str, torch.Tensor]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}


def keys_of(arch: gguf.MODEL_ARCH, config: Any) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    eps = next(getattr(config, name) for name in names if hasattr(config, name))
    inner = (
        getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None) or 4 * hidden
    )
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": getattr(config, "max_position_embeddings", 64),
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads_of(config),
        (RMS if hasattr(config, "rms_norm_eps") else CENTRED): eps,
        "rope.freq_base": float(full.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
    }
    if arch in (ARCH.GEMMA, ARCH.GEMMA2, ARCH.GEMMA3):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    if getattr(config, "model_type", "") == "olmo3":
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        keys["attention.sliding_window_pattern"] = pattern
    if arch is ARCH.GEMMA2:
        keys["attn_logit_softcapping"] = config.attn_logit_softcapping
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    if arch is ARCH.GEMMA3:
        keys["attention.sliding_window_pattern"] = 3
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if arch is ARCH.GRANITE:
        keys |= {"attention.scale": config.attention_multiplier, "logit_scale": config.logits_scaling}
        keys |= {"embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier}
    if arch is ARCH.GPTNEOX:
        keys["use_parallel_residual"] = config.use_parallel_residual
    # older conversions wrote less, by another name
    if full.get("rope_type") == "yarn" and arch is ARCH.OLMO2:
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": full["factor"]}
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        newer = "beta_fast" in full
        keys[f"rope.scaling.{'yarn_' * newer}attn_factor"] = full["attention_factor"]
        if newer:
            keys["rope.scaling.yarn_beta_fast"] = full["beta_fast"]
    if full.get("rope_type") == "longrope":
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = full["attention_factor"]
    return keys


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_model(family: str, tmp_path: Path, empty_cache: Path) -> None:
    model = save(tmp_path / "model", FAMILIES[family][1])
    source = written(tmp_path / "model", family)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in source.tensors():
        torch.testing.assert_close(floats(tensor), expected[name], rtol=0, atol=1e-6, msg=name)
    loaded = load(source, LayerFactory.of(describe(source.config), quantization="none"))
    texts = prompts(30, 5)
    for found, text in zip(run_chunked(loaded, texts[:1], [7], 4), texts, strict=False):
        torch.testing.assert_close(found, reference_logits(model, text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["granite", "gptneox", "falcon-40b", "phi3"])
def test_blocks_of_a_reordered_matrix_keep_their_rows(
    family: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are reordered as bytes: the same floats as when the checkpoint is encoded row by row."""
    arch, config = FAMILIES[family]
    config = copy.deepcopy(config)
    config.hidden_size, config.num_attention_heads = 64, 4
    setattr(config, "ffn_hidden_size" if arch is ARCH.FALCON else "intermediate_size", 96)
    monkeypatch.setitem(FAMILIES, family, (arch, config))
    save(tmp_path / "model", config)
    kind = gguf.GGMLQuantizationType.Q8_0
    source = written(tmp_path / "model", family, kind)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in source.tensors():
        right = expected[name]
        if right.dim() == 2:
            assert isinstance(tensor, Encoded)
            right = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(right.numpy(), kind), kind))
        assert torch.equal(floats(tensor).float(), right), name


T5S = {
    "t5": seq2seq.t5(d_kv=16, num_decoder_layers=2, relative_attention_num_buckets=8),
    "flan": seq2seq.flan(d_model=64, d_kv=16, d_ff=96),
    "mt5": seq2seq.mt5(num_layers=2),
}
# As T5's SentencePiece model has them, and then pieces of one and two letters.
PIECES = [
    "<pad>",
    "</s>",
    "<unk>",
    *(f"\u2581{a}" for a in "abcdefghij"),
    *"abcdefghijklmnopqrstuvwxyz\u2581",
]
PIECES += [f"{a}{b}" for a in "aeiou" for b in "bcdfghlmnrst"][: seq2seq.VOCAB - len(PIECES)]
PIECES_METADATA = {
    "tokenizer.ggml.model": "t5",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": [
        -float(index % 7) - len(PIECES) / (1 + len(p)) for index, p in enumerate(PIECES)
    ],
    "tokenizer.ggml.token_type": [3, 3, 2, *[1] * (len(PIECES) - 3)],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_eos_token": True,
}


def written_t5(
    folder: Path, config: Any, kind: gguf.GGMLQuantizationType | None = None, more: Any = ()
) -> Path:
    names = gguf.get_tensor_name_map(ARCH.T5, config.num_layers)
    tensors = {
        names.get_name(name, try_suffixes=(".weight",)): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    small = {name: tensor for name, tensor in tensors.items() if "rel_b" in name} | dict(more)
    raw = {name: (tensor.numpy(), gguf.GGMLQuantizationType.F32) for name, tensor in small.items()}
    keys = {
        "block_count": config.num_layers,
        "decoder_block_count": config.num_decoder_layers,
        "context_length": 512,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.num_heads,
        "attention.key_length": config.d_kv,
        "attention.value_length": config.d_kv,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        RMS: config.layer_norm_epsilon,
        "decoder_start_token_id": config.decoder_start_token_id,
    }
    others = {name: tensor for name, tensor in tensors.items() if name not in small}
    return write(folder / "m.gguf", "t5", keys, others, kind, raw, PIECES_METADATA)


@pytest.mark.parametrize("family", T5S)
def test_a_converted_t5_gives_the_tokens_of_transformers(
    family: str, tmp_path: Path, empty_cache: Path
) -> None:
    model = seq2seq.save(tmp_path / "model", T5S[family], untied=family != "t5")
    path = written_t5(tmp_path / "model", T5S[family])
    llm = LLM(str(path), use_tqdm=False, dtype="float32", quantization="none")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    results = llm.generate(["a bad cafe is here", "go"], greedy, use_tqdm=False)
    for result in results:
        prompt = list(result.prompt_token_ids)
        assert prompt[-1] == 1
        assert 2 not in prompt
        expected = seq2seq.generate(model, prompt, 12)
        assert [list(result.outputs[0].token_ids)] == expected
    llm.close()


def test_blocks_of_a_t5_stay_encoded(tmp_path: Path, empty_cache: Path) -> None:
    seq2seq.save(tmp_path / "model", T5S["flan"], untied=True)
    kind = gguf.GGMLQuantizationType.Q8_0
    path = written_t5(tmp_path / "model", T5S["flan"], kind)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in GgufSource(path).tensors():
        right = expected[name]
        if right.dim() == 2 and "relative" not in name:
            assert isinstance(tensor, Encoded)
            right = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(right.numpy(), kind), kind))
        assert torch.equal(floats(tensor).float(), right), name
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for quantization in ("none", "checkpoint"):
        llm = LLM(str(path), use_tqdm=False, dtype="float32", quantization=quantization)
        found.append(
            [
                llm.generate([text], greedy, use_tqdm=False)[0].outputs[0].token_ids[:3]
                for text in ("abc", "go")
            ]
        )
        llm.close()
    assert found[0] == found[1]


def test_a_t5_with_a_table_in_every_layer_is_refused(tmp_path: Path, empty_cache: Path) -> None:
    seq2seq.save(tmp_path / "model", T5S["mt5"])
    table = {"enc.blk.1.attn_rel_b.weight": torch.zeros(32, 6)}
    with pytest.raises(ModelError, match="every layer has its own table of distances, as in UMT5"):
        GgufSource(written_t5(tmp_path / "model", T5S["mt5"], more=table))


def written_gpt_oss(folder: Path, config: Any, mxfp4: bool) -> GgufSource:
    """Gate and up apart, matrices as [outputs, inputs], as the converter has them."""
    names = gguf.get_tensor_name_map(ARCH.GPT_OSS, config.num_hidden_layers)
    tensors, raw = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {name: tensor}
        if "gate_up_proj" in name:
            parts = {
                name.replace("gate_up_proj", kind): tensor[..., first::2]
                for first, kind in enumerate(("gate_proj", "up_proj"))
            }
        for part, values in parts.items():
            stem, _, suffix = part.replace("_proj_bias", "_proj.bias").rpartition(".")
            if suffix not in ("weight", "bias"):
                stem, suffix = f"{stem}.{suffix}", "weight"
            new = f"{names.get_name(stem)}.{suffix}"
            if values.dim() == 3:
                values = values.transpose(1, 2).contiguous()
            if values.dim() == 3 and mxfp4:
                kind = gguf.GGMLQuantizationType.MXFP4
                raw[new] = (gguf.quants.quantize(values.float().numpy(), kind), kind)
            else:
                tensors[new] = values
    rope = config.rope_parameters
    keys = {
        **keys_of(ARCH.GPT_OSS, config),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
    }
    return GgufSource(write(folder / "m.gguf", "gpt-oss", keys, tensors, raw=raw))


@pytest.mark.parametrize("mxfp4", [False, True])
def test_a_converted_gpt_oss_is_the_model(mxfp4: bool, tmp_path: Path, empty_cache: Path) -> None:
    config = checkpoints.gpt_oss(swiglu_limit=7.0, hidden_size=64, intermediate_size=32)
    model = save(tmp_path / "model", config)
    source = written_gpt_oss(tmp_path / "model", config, mxfp4)
    loaded = load(source, LayerFactory.of(describe(source.config), quantization="none"))
    if mxfp4:  # of the same rounded experts
        kind = gguf.GGMLQuantizationType.MXFP4
        for name, tensor in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                rows = tensor.detach().transpose(1, 2).contiguous().numpy()
                rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
                tensor.data.copy_(torch.from_numpy(rounded).view(rows.shape).transpose(1, 2))
    text = prompts(30)[0]
    found = run_chunked(loaded, [text], [7], 4)[0]
    torch.testing.assert_close(found, reference_logits(model, text), rtol=1e-4, atol=1e-4)


def written_encoder(
    folder: Path, config: Any, extra: dict[str, Any], kind: gguf.GGMLQuantizationType | None = None
) -> Path:
    arch = ARCH.MODERN_BERT if config.model_type == "modernbert" else ARCH.BERT
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors, raw = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.").removeprefix(f"{config.model_type.replace('-', '_')}.")
        name = name.removeprefix("roberta.")
        if "pooler" in name or "position_ids" in name:
            continue
        if "position_embeddings" in name and "roberta" in config.model_type:  # begins with the first token's
            tensor = tensor[config.pad_token_id + 1 :]
        if name.startswith("classifier.") and name.count(".") == 1:
            name = name.replace("classifier", "classifier.out_proj")
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        if new in ("token_types.weight", "cls.output.weight") and len(tensor) == 1:  # as in files of 2024
            tensor = tensor[0]
        tensors[new] = tensor
    if kind is not None:  # the converter leaves these as they are
        small = {name: tensors.pop(name) for name in ("position_embd.weight", "cls.output.weight")}
        raw = {name: (tensor.numpy(), gguf.GGMLQuantizationType.F32) for name, tensor in small.items()}
    keys = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "hidden_dim", None) or config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.causal": False,
        "pooling_type": int(gguf.PoolingType.RANK if "cls.weight" in tensors else gguf.PoolingType.CLS),
        "context_length": config.max_position_embeddings,
        CENTRED: getattr(config, "norm_eps", None) or getattr(config, "layer_norm_eps", 1e-12),
    }
    if "cls.weight" in tensors and config.num_labels != 2:
        keys["classifier.output_labels"] = [config.id2label[i] for i in range(config.num_labels)]
    if arch is ARCH.MODERN_BERT:
        keys |= {"attention.sliding_window": config.local_attention, "attention.sliding_window_pattern": 2}
        keys |= {"rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0}
    elif "roberta" in config.model_type:
        keys["context_length"] -= config.pad_token_id + 1
    return write(folder / "m.gguf", gguf.MODEL_ARCH_NAMES[arch], keys, tensors, kind, raw, extra)


def word_pieces(words: tuple[str, ...]) -> dict[str, Any]:
    """As the converter writes WordPiece: words begin with a mark, the rest of a word has none."""
    special = [word.startswith("[") for word in words]
    marked = [word if control else f"\u2581{word}" for word, control in zip(words, special, strict=True)]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [word.replace("\u2581##", "") for word in marked],
        "tokenizer.ggml.token_type": [3 if control else 1 for control in special],
        "tokenizer.ggml.cls_token_id": words.index("[CLS]"),
        "tokenizer.ggml.seperator_token_id": words.index("[SEP]"),
        "tokenizer.ggml.unknown_token_id": words.index("[UNK]"),
    }


def encoder(family: str, task: str, folder: Path, **changes: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A saved model for "Model" or "ForSequenceClassification", its tokenizer, and this one's metadata."""
    lines = ["the cats sat on a red mat.", "what is running?"] * 4
    if "Roberta" in family:
        tokenizer = (xlmr_tokenizer if family == "XLMRoberta" else roberta_tokenizer)(lines)
        facts = tokenizer_metadata(tokenizer, folder / "tokenizer")
        del facts["general.architecture"]
        changes |= {"vocab_size": len(tokenizer), "pad_token_id": 1, "type_vocab_size": 1}
    else:
        (folder / "vocab.txt").write_text("\n".join(encoder_folders.WORDS))
        tokenizer, facts = encoder_folders.tokenizer_of(folder), word_pieces(encoder_folders.WORDS)
        changes |= {"pad_token_id": 0}
    if family == "ModernBert":
        changes |= {"local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "mean"}
    sizes = {**encoder_folders.SIZES}
    if family == "DistilBert":
        sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40}
        sizes |= {"vocab_size": len(encoder_folders.WORDS), "initializer_range": 0.4}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{task}")(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer, facts


FAMILIES_OF_ENCODERS = ["Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert"]


@pytest.mark.parametrize("family", FAMILIES_OF_ENCODERS)
def test_a_converted_encoder_gives_the_vectors_of_transformers(
    family: str, tmp_path: Path, empty_cache: Path
) -> None:
    model, tokenizer, facts = encoder(family, "Model", tmp_path)
    path = written_encoder(tmp_path, model.config, facts)
    texts = ["The cats sat on a red mat.", "what is\n running?"]
    with Embedder(str(path), quantization="none", dtype="float32") as embedder:
        found = torch.tensor(embedder.embed(texts, use_tqdm=False))
    for text, vector in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            first = model(ids).last_hidden_state[0, 0]
        torch.testing.assert_close(vector, first / first.norm(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES_OF_ENCODERS[1:])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_converted_classifier_gives_the_scores_of_transformers(
    family: str, num_labels: int, tmp_path: Path, empty_cache: Path
) -> None:
    names = {0: "yes"} if num_labels == 1 else encoder_folders.LABELS
    model, tokenizer, facts = encoder(family, "ForSequenceClassification", tmp_path, id2label=names)
    path = written_encoder(tmp_path, model.config, facts)
    with Embedder(str(path), quantization="none", dtype="float32") as embedder, torch.inference_mode():
        if num_labels == 1:
            documents = ["the cats sat.", "a red\n mat"]
            found = torch.tensor(embedder.score("what is  running?", documents, use_tqdm=False))
            pairs = [tokenizer("what is  running?", text, return_tensors="pt") for text in documents]
            expected = torch.cat([model(**pair).logits[0].sigmoid() for pair in pairs])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        else:
            (found,) = embedder.classify("a red mat.", use_tqdm=False)
            expected = model(**tokenizer("a red mat.", return_tensors="pt")).logits[0].softmax(-1)
            assert found.label == names[int(expected.argmax())]
            torch.testing.assert_close(torch.tensor(found.probs), expected, rtol=1e-4, atol=1e-4)


def test_a_classifier_in_blocks_has_its_head_in_floats(tmp_path: Path, empty_cache: Path) -> None:
    changes = {"intermediate_size": 64, "num_labels": 2}
    model, tokenizer, facts = encoder("Roberta", "ForSequenceClassification", tmp_path, **changes)
    path = written_encoder(tmp_path, model.config, facts, gguf.GGMLQuantizationType.Q8_0)
    with Embedder(str(path), quantization="none", dtype="float32") as embedder, torch.inference_mode():
        (found,) = embedder.classify("the red cats", use_tqdm=False)
        expected = model(**tokenizer("the red cats", return_tensors="pt")).logits[0].softmax(-1)
    assert found.label == f"LABEL_{int(expected.argmax())}"
    torch.testing.assert_close(torch.tensor(found.probs), expected, rtol=0, atol=0.05)


def test_a_classifier_without_one_of_its_matrices_is_refused(tmp_path: Path) -> None:
    keys = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "attention.head_count": 1}
    keys |= {CENTRED: 1e-12, "context_length": 8, "classifier.output_labels": ["a", "b", "c"]}
    tensors = {"token_embd.weight": torch.zeros(4, 8), "cls.output.weight": torch.zeros(2, 8)}
    with pytest.raises(ModelError, match=r"conversion of BERT leaves out the other, the pooler's"):
        GgufSource(write(tmp_path / "c.gguf", "bert", keys, tensors))
    tensors["cls.weight"] = torch.zeros(8, 8)
    for labels in (["a", "b", "c"], 7, "ab"):
        wrong = {**keys, "classifier.output_labels": labels}
        with pytest.raises(ModelError, match=r"classifier\.output_labels=.* are not the names of 2 classes"):
            GgufSource(write(tmp_path / "d.gguf", "bert", wrong, tensors))
    tensors["cls.output.weight"] = torch.zeros(10**10, 0)  # takes no byte of the file
    with pytest.raises(ModelError, match=r"cls\.output\.weight has 10000000000 classes"):
        GgufSource(write(tmp_path / "e.gguf", "bert", keys, tensors))


def test_the_table_of_architectures_names_what_is_read_from_gguf() -> None:
    assert {known.gguf for known in KNOWN.values() if known.gguf} == ARCHITECTURES
