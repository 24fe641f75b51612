from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from quire.core.errors import ModelError, WeightsError
from quire.quant.encoded import Encoded, floats
from quire.weights import gguf as gguf_source
from quire.weights.gguf import GgufSource, hugging_face_name, llama3_divisors
from quire.weights.gguf_file import TENSOR_TYPES, GgufFile
from tests.weights.gguf_writing import LLAMA_KEYS, bare_llama, gguf_name, permuted, write

TYPES = [gguf.GGMLQuantizationType(kind) for kind in sorted(gguf.quants._type_traits)]


@pytest.fixture(autouse=True)
def _own_cache(empty_cache: Path) -> None:
    """No test may write into the user's cache."""


def small(kind: str, **more: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        return transformers.GPT2LMHeadModel(config).eval()
    shape |= {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 128, **more}
    config = transformers.AutoConfig.for_model(kind, **shape)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def written(path: Path, kind: str, model: transformers.PreTrainedModel, keys: dict) -> GgufSource:
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = permuted(tensor, 4 if ".q_proj." in name else 2)
        if kind == "gpt2" and tensor.dim() == 2 and ".c_" in name:
            tensor = tensor.t()
        tensors[gguf_name(name)] = tensor
    return GgufSource(write(path / f"{kind}.gguf", kind, keys, tensors))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_converted_model_comes_back_as_transformers_has_it(tmp_path: Path, kind: str, tied: bool) -> None:
    if kind == "gpt2":
        model = small(kind)
        keys = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 128}
        keys |= {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5}
    else:
        more = {"head_dim": 16} if kind == "qwen3" else {}
        more |= {"attention_bias": True} if kind == "llama" else {}
        model = small(kind, tie_word_embeddings=tied, **more)
        keys = {**LLAMA_KEYS, "block_count": 2, "rope.freq_base": 50000.0}
        keys |= {"attention.key_length": 16, "attention.value_length": 16} if kind == "qwen3" else {}
    source = written(tmp_path, kind, model, keys)
    expected = dict(model.state_dict())
    if source.config["tie_word_embeddings"]:
        expected.pop("lm_head.weight")
    found = dict(source.tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert source.num_tensors == len(found)
    assert source.num_bytes == sum(tensor.numel() * 4 for tensor in found.values())
    rebuilt = transformers.AutoConfig.for_model(**source.config)
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "model_type"):
        assert getattr(rebuilt, name) == getattr(model.config, name)
    if kind != "gpt2":
        assert source.config["rope_theta"] == 50000.0
        assert source.config["rms_norm_eps"] == 1e-5
        assert source.config["tie_word_embeddings"] is tied
        assert source.config["head_dim"] == (16 if kind == "qwen3" else 8)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_that_the_library_unpacks_is_unpacked(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    generator = np.random.default_rng(int(kind))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 60, (6, 512 // block * size), dtype=np.uint8)  # small bytes: finite scales
    path = bare_llama(tmp_path / "m.gguf", tensors={}, raw={"output.weight": (raw, kind)})
    found = floats(dict(GgufSource(path).tensors())["lm_head.weight"])
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
    assert found.shape == (6, 512)
    assert found.dtype in (torch.float32, torch.bfloat16)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_our_sizes_of_tensor_types_are_the_librarys() -> None:
    theirs = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert theirs.items() <= TENSOR_TYPES.items()


def test_unpacking_in_chunks_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(37, 64, generator=torch.Generator().manual_seed(1))
    kind = gguf.GGMLQuantizationType.Q5_1
    path = bare_llama(tmp_path / "m.gguf", tensors={"output.weight": tensor}, quantization=kind)
    whole = dict(GgufSource(path).tensors())["lm_head.weight"]
    monkeypatch.setattr("quire.weights.gguf._CHUNK_ELEMENTS", 5 * 64)
    assert torch.equal(dict(GgufSource(path).tensors())["lm_head.weight"], whole)
    assert (whole - tensor).abs().max() < 0.3


def test_half_precision_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    raw = np.arange(64, dtype=np.float16).reshape(2, 32)
    path = bare_llama(tmp_path / "m.gguf", raw={"output.weight": (raw, gguf.GGMLQuantizationType.F16)})
    found = dict(GgufSource(path).tensors())["lm_head.weight"]
    assert found.dtype == torch.float16
    assert found.tolist() == raw.tolist()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident pages are counted from /proc")
def test_pages_of_the_file_are_released_though_rows_were_read_again(tmp_path: Path) -> None:
    rows = {f"blk.{index}.attn_v.weight": torch.ones(256, 256) for index in range(8)}
    path = bare_llama(tmp_path / "large.gguf", tensors=rows)
    read = []
    for _, tensor in GgufSource(
        path
    ).tensors():  # a fused matrix joins rows of this tensor with those of earlier ones
        read.append(tensor)
        sum(floats(earlier).sum() for earlier in read)
    assert _resident_bytes(path) < 2**18


def _resident_bytes(path: Path) -> int:
    """Of all mappings of this file in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    sizes = [
        next(line for line in lines if line.startswith("Rss:")) for line in lines if line.endswith(str(path))
    ]
    return sum(1024 * int(size.split()[1]) for size in sizes)


def test_the_fingerprint_follows_the_file(tmp_path: Path) -> None:
    first = GgufSource(bare_llama(tmp_path / "a.gguf")).fingerprint
    assert GgufSource(tmp_path / "a.gguf").fingerprint == first
    assert GgufSource(bare_llama(tmp_path / "b.gguf", keys={"context_length": 64})).fingerprint != first


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_comes_from_metadata(tmp_path: Path, keys: dict, expected: dict | None) -> None:
    assert GgufSource(bare_llama(tmp_path / "m.gguf", keys=keys)).config["rope_scaling"] == expected


def test_llama3_scaling_is_recognised_by_its_frequencies(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072)
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config.rope_parameters = scaling
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    base = 500000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    keys = {"embedding_length": 512, "rope.freq_base": 500000.0}
    tensors = {"rope_freqs.weight": (base / scaled.double()).float()}
    source = GgufSource(bare_llama(tmp_path / "m.gguf", keys=keys, tensors=tensors))
    found = source.config["rope_scaling"]
    assert found == {name: value for name, value in scaling.items() if name != "rope_theta"}
    assert np.allclose(
        llama3_divisors(found, 500000.0, 128), base.numpy() / scaled.double().numpy(), rtol=1e-5
    )
    assert "rope_freqs.weight" not in dict(source.tensors())


def test_foreign_frequencies_are_refused(tmp_path: Path) -> None:
    path = bare_llama(tmp_path / "m.gguf", tensors={"rope_freqs.weight": torch.linspace(1, 7, 4)})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not Llama 3's"):
        GgufSource(path)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.999])
def test_a_cut_file_is_refused_before_any_tensor_is_read(tmp_path: Path, share: float) -> None:
    path = bare_llama(tmp_path / "m.gguf", extra={"tokenizer.ggml.tokens": [f"token{i}" for i in range(500)]})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(WeightsError, match="cut") as caught:
        GgufSource(path)
    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF", "cut or damaged"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "version 50331648"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "cut or damaged"),
        (
            b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 64,
            "cut or damaged",
        ),
    ],
)
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(WeightsError, match=said) as caught:
        GgufFile(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


def test_what_cannot_be_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file"):
        GgufSource(tmp_path / "none.gguf")
    with pytest.raises(
        ModelError, match=r"'mamba' is not known here: known are bert, bloom, .*, llama, .*qwen3, "
    ):
        GgufSource(write(tmp_path / "a.gguf", "mamba", {}, {"token_embd.weight": torch.ones(4, 4)}))
    with pytest.raises(
        ModelError, match="'t5encoder' is not known here: the nearest is t5; known are bert, bloom"
    ):
        GgufSource(write(tmp_path / "t.gguf", "t5encoder", {}, {"token_embd.weight": torch.ones(4, 4)}))
    keys = {**LLAMA_KEYS, "expert_count": 8}
    with pytest.raises(ModelError, match="8 experts per layer: not known of granite"):
        GgufSource(write(tmp_path / "b.gguf", "granite", keys, {"token_embd.weight": torch.ones(4, 4)}))
    with pytest.raises(ModelError, match=r"no llama\.expert_used_count"):
        GgufSource(bare_llama(tmp_path / "b.gguf", keys={"expert_count": 8}))
    some = {"keys": {"expert_count": 8, "expert_used_count": 2}}
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_gate\.3\.weight' is not one that a llama model has"):
        GgufSource(
            bare_llama(tmp_path / "f.gguf", **some, tensors={"blk.0.ffn_gate.3.weight": torch.ones(64, 32)})
        )
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_up_exps\.weight is \[7, 64, 32\].*8 experts"):
        GgufSource(
            bare_llama(
                tmp_path / "g.gguf", **some, tensors={"blk.0.ffn_up_exps.weight": torch.ones(7, 64, 32)}
            )
        )
    with pytest.raises(ModelError, match="one of 3 parts"):
        GgufSource(bare_llama(tmp_path / "c.gguf", extra={"split.count": 3}))
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_sinks\.weight' is not one that a llama model has"):
        GgufSource(bare_llama(tmp_path / "d.gguf", tensors={"blk.0.attn_sinks.weight": torch.ones(4)}))
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_gate\.weight' is not one that a gpt2 model has"):
        hugging_face_name("gpt2", "blk.0.ffn_gate.weight", {})
    with pytest.raises(ModelError, match="rope scaling 'longrope' is not known here"):
        GgufSource(bare_llama(tmp_path / "e.gguf", keys={"rope.scaling.type": "longrope"}))


def test_a_type_that_the_library_cannot_unpack_is_named(tmp_path: Path) -> None:
    raw = np.zeros((2, 292), dtype=np.uint8)
    path = bare_llama(tmp_path / "m.gguf", raw={"output.weight": (raw, gguf.GGMLQuantizationType.Q8_K)})
    with pytest.raises(WeightsError, match=r"'output.weight' is Q8_K, which the gguf library cannot unpack"):
        list(GgufSource(path).tensors())


def test_end_tokens_and_templates_come_from_metadata(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<turn>", "a"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    source = GgufSource(bare_llama(tmp_path / "m.gguf", extra=extra))
    assert source.generation_config == {"eos_token_id": [1, 2]}
    assert source.config["bos_token_id"] == 0
    config = source.tokenizer_config()
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert config["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_known_kinds_stay_in_the_bytes_of_the_file(tmp_path: Path, kind: str) -> None:
    library = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[library]
    raw = np.random.default_rng(1).integers(0, 60, (6, 512 // block * size), dtype=np.uint8)
    source = GgufSource(bare_llama(tmp_path / "m.gguf", tensors={}, raw={"output.weight": (raw, library)}))
    found = dict(source.tensors())["lm_head.weight"]
    assert isinstance(found, Encoded)
    assert found.scheme == source.encodings["lm_head.weight"].scheme
    assert found.parts["blocks"].flatten().tolist() == raw.flatten().tolist()
    assert found.bits == source.min_bits == 8 * size / block


@pytest.mark.parametrize(("limit", "large"), [(54, True), (55, False)])
def test_only_files_with_many_bytes_in_blocks_say_that_they_are_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, large: bool
) -> None:
    """`limit`: in place of 512 MiB, of a file with 54 bytes in blocks."""
    assert gguf_source._LARGE == 512 << 20
    monkeypatch.setattr(gguf_source, "_LARGE", limit)
    raw = {"output.weight": (np.zeros((3, 18), dtype=np.uint8), gguf.GGMLQuantizationType.Q4_0)}
    source = GgufSource(bare_llama(tmp_path / "m.gguf", tensors={}, raw=raw))
    assert ("quantization_config" in source.config) == large


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    raw = np.zeros((2, 18 * 16), dtype=np.uint8)
    raw[1, :2] = 0xFF, 0x7F
    kind = gguf.GGMLQuantizationType.Q4_0
    path = bare_llama(tmp_path / "m.gguf", tensors={}, raw={"output.weight": (raw, kind)})
    with pytest.raises(WeightsError, match=r"output\.weight.*Q4_0 block 16 has a scale of nan.*again"):
        list(GgufSource(path).tensors())
