"""Quantized checkpoints that the packages wrote: logits of their own dequantized models, and one line for bad ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelError, QuireError, WeightsError
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.registry import describe
from quire.models.weight_shape import weight_groups, weight_shape
from quire.quant.choice import choose_format
from quire.quant.encoded import Encoded
from quire.quant.format import NumberFormat
from quire.weights.folder import FolderSource
from quire_lab.baselines.vector_wise import VectorWise
from quire_lab.measure import outliers
from tests.models.checkpoints import llama, prompts, save
from tests.models.paging import run_chunked

DATA = Path(__file__).parents[1] / "data" / "quantized"
FOLDERS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
MODULE = "model.layers.0.self_attn.q_proj"


def loaded(folder: Path, quantization: str = "auto", dtype: str = "float32") -> DecoderModel:
    """By default activations stay float32; with dtype auto, a CPU's kernels round them to int8."""
    source = FolderSource(folder)
    return load(source, LayerFactory.of(describe(source.config), dtype=dtype, quantization=quantization))


def logits_of(model: DecoderModel, tokens: list[int]) -> Tensor:
    return run_chunked(model, [tokens], [len(tokens)], 4)[0]


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def expected(name: str) -> tuple[list[int], Tensor]:
    kept = load_file(DATA / name / "expected.safetensors")
    return kept["tokens"].tolist(), kept["logits"]


def test_every_format_is_here() -> None:
    assert {"awq", "gptq", "gptq-asym", "bnb-nf4", "bnb-nf4-nested", "bnb-fp4", "bnb-int8"} <= set(FOLDERS)
    assert {f"ct-{n}" for n in ("w4a16", "w4a16-asym", "w8a8", "fp8-dynamic", "fp8-block")} <= set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_the_packages_own_dequantized_model(name: str) -> None:
    tokens, right = expected(name)
    source = FolderSource(DATA / name)
    factory = LayerFactory.of(describe(source.config), dtype="float32")
    model = load(source, factory)
    assert factory.number_format.name == "checkpoint"
    assert error(logits_of(model, tokens), right) < 1e-3
    kept = sum(tensor.nbytes for tensor in model.parameters().values())
    assert kept == weight_shape(describe(source.config), factory.number_format, source.encodings).num_bytes
    decoded = logits_of(loaded(DATA / name, "none"), tokens)
    assert error(decoded, right) < 1e-3


@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("int8", 0.1), ("llm-int8", 0.1), ("int4", 1e-3), ("nf4", 0.6)]
)
def test_a_quantized_checkpoint_can_be_served_in_another_format(
    quantization: str, tolerance: float, empty_cache: Path
) -> None:
    tokens, right = expected("awq")
    assert error(logits_of(loaded(DATA / "awq", quantization), tokens), right) < tolerance


def test_bits_are_reported_by_parts_of_the_model(tmp_path: Path, empty_cache: Path) -> None:
    model = loaded(DATA / "awq")
    groups = {group.part: group for group in weight_groups(model)}
    assert list(groups) == ["attention", "MLP", "embedding", "head", "norms and biases"]
    assert groups["attention"].layers == ("qkv", "output")
    assert groups["MLP"].layers == ("gate_up", "down")
    assert groups["MLP"].scheme == "int4-g64z"
    assert groups["MLP"].bits == pytest.approx(4.375)
    assert [part for part, group in groups.items() if group.is_precise] == [
        "embedding",
        "head",
        "norms and biases",
    ]
    kept = sum(tensor.nbytes for tensor in model.parameters().values())
    assert sum(group.num_bytes for group in groups.values()) == kept
    save(tmp_path, llama(hidden_size=192, intermediate_size=128, tie_word_embeddings=True))
    for _ in range(2):  # quantized, then mapped
        first, _, table, _ = weight_groups(loaded(tmp_path, "nf4", "auto"))
        assert first.scheme == "nf4-b64n"
        assert 4.127 < first.bits < 4.25
        assert table.part == "embedding, head"
    source = FolderSource(tmp_path)
    sized = weight_shape(
        describe(source.config), LayerFactory.of(describe(source.config), quantization="nf4").number_format
    )
    assert sized.groups == weight_groups(loaded(tmp_path, "nf4", "auto"))


def altered(tmp_path: Path, name: str, **config: Any) -> Path:
    """A copy whose quantization_config has other values."""
    folder = tmp_path / name
    shutil.copytree(DATA / name, folder)
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def rewrite(folder: Path, **tensors: Any) -> None:
    """Other tensors of MODULE, by suffix; None leaves one out."""
    path = folder / "model.safetensors"
    changed = load_file(path) | {f"{MODULE}.{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)


def words_of(values: Tensor, dim: int) -> Tensor:
    """uint4 values -> int32 words along `dim`, the lowest bits first."""
    spread = values.long().unflatten(dim, (-1, 8))
    shifts = torch.arange(0, 32, 4).view(-1, *[1] * (spread.dim() - dim - 2))
    words = (spread << shifts).sum(dim + 1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq_of_both_versions_with_and_without_act_order(
    tmp_path: Path, version: str, desc_act: bool
) -> None:
    """By the layout's definition: column k of group g_idx[k] is scale × (q − zero)."""
    folder = altered(tmp_path, "gptq-asym", checkpoint_format=version, desc_act=desc_act)
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 16, (128, 128), generator=generator)  # [columns, rows]
    zeros = torch.randint(1, 16, (4, 128), generator=generator)
    scales = (torch.rand(4, 128, generator=generator) * 0.01 + 0.001).half()
    groups = torch.arange(128) // 32
    groups = groups[torch.randperm(128, generator=generator)] if desc_act else groups
    stored = zeros - 1 if version == "gptq" else zeros
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(".qzeros")] if version == "gptq_v2" else []:
        tensors[name] = tensors[name] + 0x11111111  # the other modules, in the new version
    save_file(tensors, path)
    rewrite(folder, qweight=words_of(q, 0), qzeros=words_of(stored, 1), scales=scales, g_idx=groups.int())
    right = (scales.float()[groups] * (q - zeros[groups])).T
    found = dict(FolderSource(folder).tensors())[f"{MODULE}.weight"]
    assert isinstance(found, Encoded)
    assert found.scheme.name == ("int4-g32zp" if desc_act else "int4-g32z")
    torch.testing.assert_close(found.decode(), right)
    tokens, _ = expected("gptq-asym")
    assert error(logits_of(loaded(folder), tokens), logits_of(loaded(folder, "none"), tokens)) < 1e-4


def test_compressed_tensors_in_act_order(tmp_path: Path) -> None:
    folder = altered(tmp_path, "ct-w4a16-asym")
    path = folder / "model.safetensors"
    down = "model.layers.0.mlp.down_proj"
    tensors = load_file(path)
    plain = dict(FolderSource(folder).tensors())[f"{down}.weight"]
    assert isinstance(plain, Encoded)
    groups = (torch.arange(384) // 128)[torch.randperm(384, generator=torch.Generator().manual_seed(1))]
    for name in [n for n in tensors if n.endswith(".weight_packed")]:
        module, columns = name.removesuffix(".weight_packed"), tensors[name].shape[1] * 8
        tensors[f"{module}.weight_g_idx"] = (torch.arange(columns) // 128).int()
    tensors[f"{down}.weight_g_idx"] = groups.int()
    save_file(tensors, path)
    found = dict(FolderSource(folder).tensors())[f"{down}.weight"]
    assert isinstance(found, Encoded)
    q = (plain.parts["packed"].view(128, -1, 1) >> torch.tensor([0, 4], dtype=torch.uint8)) & 15
    scales, zeros = plain.parts["scales"].float()[:, groups], plain.parts["zeros"].int()[:, groups]
    torch.testing.assert_close(found.decode(), scales * (q.view(128, 384).int() - zeros))
    tokens, _ = expected("ct-w4a16-asym")
    assert error(logits_of(loaded(folder), tokens), logits_of(loaded(folder, "none"), tokens)) < 1e-4


def refused(folder: Path, *said: str, error: type[QuireError] = ModelError) -> None:
    with pytest.raises(error) as caught:
        loaded(folder)
    text = str(caught.value)
    assert all(words in text for words in said), text
    assert "\n" not in text


def test_schemes_that_are_not_known_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    refused(
        altered(tmp_path / "1", "ct-w4a16", format="nvfp4-pack-quantized"), "nvfp4", "pack-quantized, int-"
    )
    refused(altered(tmp_path / "2", "awq", version="gemv"), "'gemv'", "gemm")
    refused(altered(tmp_path / "3", "gptq", bits=3), "3 bits", "known is 4")
    refused(altered(tmp_path / "4", "gptq", checkpoint_format="marlin"), "'marlin'", "gptq_v2")
    refused(altered(tmp_path / "5", "gptq", quant_method="quip"), "'quip'", "awq, gptq, bitsandbytes")


def test_a_config_that_contradicts_its_tensors_is_named(tmp_path: Path) -> None:
    refused(
        altered(tmp_path / "1", "gptq", quant_method="awq"),
        "GPTQ's layout",
        "'awq'",
        "config.json that belongs",
    )
    refused(altered(tmp_path / "2", "awq", quant_method="gptq"), "AWQ's layout", "'gptq'")
    refused(altered(tmp_path / "3", "awq", group_size=128), "groups of 64", "group_size=128")
    refused(
        altered(tmp_path / "4", "awq", quant_method="bitsandbytes"), "'bitsandbytes'", "AWQ or GPTQ weights"
    )
    refused(
        altered(tmp_path / "5", "bnb-int8", load_in_4bit=True, load_in_8bit=False),
        "load_in_4bit=True",
        "8 bits",
    )
    refused(
        altered(tmp_path / "6", "gptq-asym", sym=True),
        "qzeros has zero point",
        "sym=true",
        error=WeightsError,
    )
    refused(
        altered(tmp_path / "7", "ct-w8a8", config_groups={}),
        "model.layers.0",
        "int8",
        "no weights",
    )
    folder = altered(tmp_path / "8", "awq")
    whole = json.loads((folder / "config.json").read_text())
    del whole["quantization_config"]
    (folder / "config.json").write_text(json.dumps(whole))
    refused(folder, "qweight", "no quantization_config")


@pytest.mark.parametrize(
    ("name", "suffix", "value"),
    [("awq", "scales", torch.nan), ("ct-w4a16", "weight_scale", 0.0), ("ct-fp8-block", "weight_scale", torch.inf),
     ("bnb-int8", "SCB", torch.nan), ("bnb-nf4", "weight.absmax", torch.nan)],
)  # fmt: skip
def test_scales_that_are_no_numbers_or_zero_are_named(
    tmp_path: Path, name: str, suffix: str, value: float
) -> None:
    folder = altered(tmp_path, name)
    scales = load_file(folder / "model.safetensors")[f"{MODULE}.{suffix}"]
    scales.view(-1)[0] = value
    rewrite(folder, **{suffix: scales})
    refused(folder, f"{MODULE}.{suffix}", f"scale of {value}", "again", error=WeightsError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_packed_weights_of_another_type_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = altered(tmp_path, "ct-w4a16")
    packed = load_file(folder / "model.safetensors")[f"{MODULE}.weight_packed"]
    rewrite(folder, weight_packed=packed.to(dtype))
    refused(
        folder, f"{MODULE}: weight_packed is ", "values of 4 or 8 bits in I32: fetch the checkpoint again"
    )


def test_cut_blocks_and_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = altered(tmp_path / "1", "bnb-nf4")
    rewrite(folder, weight=torch.zeros(100, 1, dtype=torch.uint8))
    refused(folder, f"{MODULE}.weight has 100 bytes", "8,192", error=WeightsError)
    folder = altered(tmp_path / "2", "awq")
    rewrite(folder, scales=None)
    refused(folder, f"{MODULE}.scales is missing")
    folder = altered(tmp_path / "3", "gptq")
    rewrite(folder, qzeros=torch.zeros(3, 16, dtype=torch.int32))
    refused(folder, MODULE, error=WeightsError)
    folder = altered(tmp_path / "4", "gptq")
    rewrite(folder, scales=torch.ones(3, 128).half())
    refused(folder, f"{MODULE}: 3 groups do not divide 128 columns")


def flat(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone()


def shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


def none_of(tensor: Tensor) -> Tensor:
    return tensor[:0].clone()


def of_nan(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, torch.nan).to(tensor.dtype)


def missing(tensor: Tensor) -> None:
    return None


@pytest.mark.parametrize(
    ("name", "suffix", "change", "said"),
    [("bnb-nf4", "weight.absmax", shorter, "invalid for input"), ("bnb-nf4", "weight.absmax", missing, "missing"),
     ("bnb-nf4-nested", "weight.absmax", shorter, "invalid for input"),
     ("bnb-nf4-nested", "weight.nested_absmax", none_of, "0 scales where 1 are needed"),
     ("bnb-nf4-nested", "weight.nested_absmax", missing, "nested_absmax is missing"),
     ("bnb-int8", "weight", flat, "values to unpack"), ("bnb-int8", "SCB", shorter, "its scales"),
     ("gptq", "scales", flat, "IndexError"), ("gptq", "qweight", flat, "IndexError"),
     ("gptq", "qzeros", missing, "qzeros is missing"),
     ("gptq", "scales", lambda scales: torch.full_like(scales.float(), 1e9), "scale of 1000000000.0"),
     ("ct-w4a16", "weight_shape", missing, "weight_shape is missing"),
     ("ct-w4a16", "weight_shape", lambda _: torch.tensor([1, 2, 3]), "values to unpack"),
     ("ct-w4a16", "weight_scale", lambda _: torch.tensor(1.0), "IndexError"),
     ("ct-fp8-block", "weight_scale", none_of, "RuntimeError"), ("ct-fp8-dynamic", "weight", of_nan, "holds NaN")],
)  # fmt: skip
def test_damaged_tensors_are_named(
    tmp_path: Path, name: str, suffix: str, change: Callable[[Tensor], Tensor | None], said: str
) -> None:
    folder = altered(tmp_path, name)
    rewrite(folder, **{suffix: change(load_file(folder / "model.safetensors")[f"{MODULE}.{suffix}"])})
    refused(folder, MODULE, said, "again", error=WeightsError)


@pytest.mark.parametrize(
    "change",
    [{"nested_offset": None}, {"nested_offset": torch.nan}, {"blocksize": "x"}, {"shape": ["a", "b"]}, [1, 2], 5],
)  # fmt: skip
def test_damaged_states_of_bitsandbytes_are_named(tmp_path: Path, change: Any) -> None:
    folder = altered(tmp_path, "bnb-nf4-nested")
    suffix = "weight.quant_state.bitsandbytes__nf4"
    state = load_file(folder / "model.safetensors")[f"{MODULE}.{suffix}"]
    if isinstance(change, dict):
        merged = json.loads(bytes(state.tolist())) | change
        change = {key: value for key, value in merged.items() if value is not None}
    rewrite(folder, **{suffix: torch.tensor(list(json.dumps(change).encode()), dtype=torch.uint8)})
    refused(folder, MODULE, "again", error=WeightsError)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e9])
@pytest.mark.parametrize("quantization", ["int4", "nf4", "fp4", "int8"])
def test_weights_that_scales_cannot_hold_are_named_and_not_cached(
    tmp_path: Path, empty_cache: Path, quantization: str, value: float
) -> None:
    save(tmp_path, llama(hidden_size=128, intermediate_size=256, num_attention_heads=4))
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    weights = load_file(path)
    weights[name][3, 5] = value
    save_file(weights, path, metadata={"format": "pt"})
    if value == 1e9 and quantization != "int4":  # whose scales are float16
        assert logits_of(loaded(tmp_path, quantization, "auto"), [1, 2, 3]).isfinite().all()
        return
    for _ in range(2):
        with pytest.raises(WeightsError, match=rf"{name} .*row 3 holds NaN"):
            loaded(tmp_path, quantization, "auto")


@pytest.mark.parametrize("groups", [[1], {"group_0": "text"}])
def test_damaged_groups_of_compressed_tensors_are_named(tmp_path: Path, groups: Any) -> None:
    folder = altered(tmp_path, "ct-w4a16", config_groups=groups)
    refused(folder, "quantization_config: damaged", "again", error=WeightsError)


# ---------------------------------------------------------------------- LLM.int8 in a model


def test_outliers_cost_plain_int8_ten_times_the_divergence_of_the_decomposition(tmp_path: Path) -> None:
    save(
        tmp_path, llama(hidden_size=128, intermediate_size=256, num_attention_heads=4, initializer_range=0.08)
    )
    source = FolderSource(tmp_path)
    (tokens,) = prompts(40)

    def divergence(number_format: NumberFormat, with_outliers: bool) -> float:
        model = outliers.loaded(source, LayerFactory(number_format), 0, with_outliers)
        found = torch.log_softmax(logits_of(model, tokens), -1)
        return float((right.exp() * (right - found)).sum(-1).mean())

    exact, decomposed = (choose_format("cpu", quantization=name) for name in ("none", "llm-int8"))
    right = torch.log_softmax(logits_of(outliers.loaded(source, LayerFactory(exact), 0, False), tokens), -1)
    plain = VectorWise()
    assert divergence(exact, True) < 1e-9
    assert divergence(plain, True) > 10 * divergence(decomposed, True)
    assert divergence(decomposed, True) < 1.5 * divergence(plain, False)


def test_llm_int8_gives_the_same_bits_alone_and_in_a_batch_of_80(tmp_path: Path) -> None:
    save(tmp_path / "model", llama(hidden_size=128, intermediate_size=256, num_attention_heads=4))
    source = FolderSource(tmp_path / "model")
    decomposed = choose_format("cpu", quantization="llm-int8")
    model = outliers.loaded(source, LayerFactory(decomposed), 0, with_outliers=True)
    texts = prompts(*(3 + i % 9 for i in range(80)))
    together = run_chunked(model, texts, [len(text) for text in texts], 4)
    for i in range(0, 80, 11):
        assert torch.equal(logits_of(model, texts[i]), together[i])
