"""Whatever number a file of a model holds, it is clamped, or refused by its name before it is used."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ModelError, QuireError, WeightsError
from quire.engine.build.resolve import default_sampling, end_token_ids
from quire.layers.factory import LayerFactory
from quire.link.messages import Described, encode
from quire.models import registry
from quire.models.loading import load
from quire.text.load import tokenizer_files
from quire.weights.folder import FolderSource
from tests.models.checkpoints import llama, mistral, save
from tests.models.llama2 import NO_LIMIT

HOSTILE: tuple[Any, ...] = (
    *(10**30, -(10**30), 2**31, -1, 0, 1.5, float("nan"), float("inf"), 1e300),
    *("8", "", [8], [], {"a": 1}, True),
)
NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window"),
    *("eos_token_id", "bos_token_id", "rope_theta", "partial_rotary_factor"),
    *("original_max_position_embeddings",),
)
ROPE = ("rope_theta", "factor", "partial_rotary_factor", "beta_fast", "mscale", "attention_factor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "mistral"
    save(path, mistral(num_hidden_layers=1))
    return path


def opened(folder: Path, **changes: Any) -> FolderSource:
    path = folder / "config.json"
    kept = path.read_text()
    path.write_text(json.dumps({**json.loads(kept), **changes}))
    try:
        return FolderSource(folder)
    finally:
        path.write_text(kept)


def outcome(folder: Path, max_position: int | None = 64, **changes: Any) -> str:
    """Empty where the model loads, else what was refused. Any other error fails the test."""
    try:
        source = opened(folder, **changes)
        model = registry.describe(source.config)
        load(source, LayerFactory.of(model, quantization="none", max_position=max_position))
        encode([list(model.eos_token_ids), model.bos_token_id, model.max_position])
    except (ModelError, WeightsError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_config_json_is_refused_by_its_name(folder: Path, name: str) -> None:
    rope = {"rope_parameters": None} if name in ROPE else {}
    for value in HOSTILE:
        refused = outcome(folder, **{name: value}, **rope)
        sizes = "tensor " in refused or "there is no memory" in refused or "heads" in refused
        assert not refused or name in refused or sizes, (value, refused)
    assert name in outcome(folder, **{name: "8"}, **rope)
    assert name in outcome(folder, **{name: 10**30}, **rope) or name in ("rms_norm_eps", "rope_theta")


@pytest.mark.parametrize("name", ROPE)
def test_a_rope_setting_is_refused_by_its_name(folder: Path, name: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    for value in HOSTILE:
        refused = outcome(folder, rope_parameters=None, rope_scaling={**yarn, name: value})
        assert not refused or name in refused, (value, refused)
    for value in ("8", float("nan"), -1):
        assert name in outcome(folder, rope_parameters=None, rope_scaling={**yarn, name: value})


@pytest.mark.parametrize("value", [8, "x", ["x"], True])
def test_what_should_be_an_object_or_a_list_is_refused(folder: Path, value: Any) -> None:
    for name in ("rope_parameters", "architectures", "quantization_config"):
        assert outcome(folder, **{name: value}), name


def test_no_end_token_is_not_an_error(folder: Path) -> None:
    source = opened(folder, eos_token_id=-1, pad_token_id=-1)
    assert registry.describe(source.config).eos_token_ids == ()


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"]
)
def test_a_number_of_generation_config_json_is_refused_by_its_name(folder: Path, name: str) -> None:
    path = folder / "generation_config.json"
    model = ModelConfig(**_description(folder))
    for value in HOSTILE:
        path.write_text(json.dumps({name: value}))
        source = FolderSource(folder)
        refused = ""
        try:
            encode([default_sampling(source), list(end_token_ids(source, model))])
        except ModelError as error:
            refused = str(error)
        assert not refused or ("generation_config.json" in refused and name in refused)
    path.unlink()


def _description(folder: Path) -> dict[str, Any]:
    model = registry.describe(FolderSource(folder).config)
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


@pytest.mark.parametrize(
    "value", [NO_LIMIT, -NO_LIMIT, 10**400, float("nan"), float("inf"), [10**30], {"a": 10**30}]
)
def test_tokenizer_config_json_travels_whatever_it_holds(folder: Path, value: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"model_max_length": value, "bos_token": value, "chat_template": value}))
    source = FolderSource(folder)
    files = tokenizer_files(EngineConfig.of().model, source)
    sent = encode(Described(files.text, dict(files.config), dict(source.tokenizer_config())))
    assert b"model_max_length" in sent
    path.unlink()


def test_a_number_of_a_million_digits_and_deep_nesting_are_read_in_no_time(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text('{"model_max_length": ' + "9" * 1_000_000 + "}")
    assert FolderSource(folder).tokenizer_config()["model_max_length"] == 2**63 - 1
    path.write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(QuireError, match=r"tokenizer_config\.json is not valid JSON"):
        FolderSource(folder).tokenizer_config()
    path.unlink()


def test_sizes_that_no_memory_holds_are_named(tmp_path: Path) -> None:
    save(tmp_path / "llama", llama(num_hidden_layers=1))
    refused = outcome(tmp_path / "llama", max_position=None, max_position_embeddings=2**31 - 1)
    assert "there is no memory for a model of 1 layers" in refused
    assert "2147483647 positions" in refused
