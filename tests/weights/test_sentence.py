"""What an encoder's folder says about itself: pooling, length, kind, and a tokenizer from a bare vocabulary."""

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.core.errors import ModelError, WeightsError
from quire.text.tokenizer import Tokenizer
from quire.weights.architectures import task_of
from quire.weights.builtin import BUILTIN_ENCODER_NAMES
from quire.weights.folder import FolderSource
from quire.weights.sentence import SentenceFiles, read_sentence_files
from quire.weights.wheel import WheelFile, fetched

POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_without_files_it_is_the_normalised_mean(tmp_path: Path) -> None:
    assert read_sentence_files(tmp_path) == SentenceFiles("mean", True, None)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "max"}, "max"),
    ],
)
def test_the_modules_say_how_tokens_become_a_vector(tmp_path: Path, pooling: Any, kind: str) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING])
    write(tmp_path, "1_Pooling/config.json", {"word_embedding_dimension": 8, **pooling})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256})
    assert read_sentence_files(tmp_path) == SentenceFiles(kind, False, 256)
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING, NORMALIZE])
    assert read_sentence_files(tmp_path).normalize


def test_steps_that_are_not_known_are_named(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING, {"type": "sentence_transformers.models.Dense"}])
    with pytest.raises(WeightsError, match="1_Pooling"):
        read_sentence_files(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(ModelError, match="weightedmean"):
        read_sentence_files(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    with pytest.raises(ModelError, match="Dense"):
        read_sentence_files(tmp_path)
    write(tmp_path, "modules.json", "{")
    with pytest.raises(WeightsError, match="not valid JSON"):
        read_sentence_files(tmp_path)


def test_the_kind_of_a_model_is_seen_without_its_weights(tmp_path: Path) -> None:
    assert all(task_of(name) == "embed" for name in BUILTIN_ENCODER_NAMES)
    assert task_of(None) == "generate"
    assert task_of("model.gguf") == "generate"
    assert task_of("./nowhere") == "generate"
    write(tmp_path, "config.json", {"architectures": ["XLMRobertaModel"]})
    assert task_of(str(tmp_path)) == "embed"
    write(tmp_path, "config.json", {"architectures": ["LlamaForCausalLM"]})
    assert task_of(str(tmp_path)) == "generate"
    write(tmp_path, "config.json", "{")
    assert task_of(str(tmp_path)) == "generate"
    kinds = {
        "BertForSequenceClassification": "embed",
        "ModernBertForMaskedLM": "embed",
        "DebertaV2ForSequenceClassification": "embed",  # unknown: refused beside the encoders that are known
        "Qwen3Model": "embed",
        "GPT2LMHeadModel": "generate",
    }
    for name, task in kinds.items():
        write(tmp_path, "config.json", {"architectures": [name]})
        assert task_of(str(tmp_path)) == task, name
    write(tmp_path, "config.json", {"architectures": ["Qwen3ForCausalLM"]})
    assert task_of(str(tmp_path)) == "generate"
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING])  # as Qwen3-Embedding has it
    assert task_of(str(tmp_path)) == "embed"


def test_prompts_are_read_and_a_wrong_default_is_named(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER])
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    name = "config_sentence_transformers.json"
    write(tmp_path, name, {"prompts": prompts, "default_prompt_name": "query"})
    files = read_sentence_files(tmp_path)
    assert (files.prompts, files.default_prompt) == (prompts, "query")
    write(tmp_path, name, {"prompts": prompts, "default_prompt_name": "x"})
    with pytest.raises(WeightsError, match="no prompt 'x'"):
        read_sentence_files(tmp_path)
    write(tmp_path, name, {"prompts": {"query": 5}})
    with pytest.raises(WeightsError, match="prompts"):
        read_sentence_files(tmp_path)


def test_a_bare_vocabulary_makes_berts_own_tokenizer(model_folder: Path) -> None:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "un",
        "##want",
        "##ed",
        "cafe",
        ",",
        "!",
        "东",
        "\u2028",  # no end of a line
        "late",
    ]
    (model_folder / "tokenizer.json").unlink()
    write(model_folder, "vocab.txt", "\n".join(words) + "\n")
    write(model_folder, "tokenizer_config.json", {"do_lower_case": True, "cls_token": {"content": "[CLS]"}})
    text = FolderSource(model_folder).tokenizer_json()
    assert text is not None
    ours = Tokenizer(text)
    theirs = transformers.BertTokenizer(str(model_folder / "vocab.txt"))
    for sample in ("The unwanted café, 东 !", "", "the [MASK] nothing", "UNWANTED\tthe", "the late"):
        assert ours.encode(sample) == theirs(sample)["input_ids"], sample


@pytest.mark.usefixtures("empty_cache")
def test_a_wheels_file_comes_with_its_companions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"model.safetensors": b"weights", "config.json": b"{}", "1_Pooling/config.json": b"[]"}
    packed = tmp_path / "one-1-py3-none-any.whl"
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"one/model/{name}", content)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    main = sums.pop("model.safetensors")
    companions = tuple(sums.items())
    wanted = WheelFile("one", "1", "one/model/model.safetensors", 7, main, 7, "ONE_WHEEL", "one", companions)
    monkeypatch.setenv("ONE_WHEEL", str(packed))
    folder = fetched(wanted).parent
    assert {name: (folder / name).read_bytes() for name in files} == files
    (folder / "config.json").unlink()
    assert (fetched(wanted).parent / "config.json").is_file()
    (folder / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config.json.*fetch again"):
        fetched(replace(wanted, companions=(("config.json", "0" * 64),)))
    monkeypatch.setenv("ONE_WHEEL", str(folder / "model.safetensors"))
    with pytest.raises(WeightsError, match="no wheel"):
        fetched(wanted)
