"""Folders of tiny random encoders with a tokenizer, as people have them from the hub."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.checkpoints import qwen3

WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(
        "the",
        "cat",
        "dog",
        "sat",
        "ran",
        "on",
        "mat",
        "a",
        "red",
        "blue",
        "##s",
        "##ing",
        "what",
        "is",
        "?",
        ".",
    ),
)
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.4,
}
LABELS = {0: "bad", 1: "fair", 2: "good"}


def bert(**changes: Any) -> transformers.BertConfig:
    return transformers.BertConfig(**{**SIZES, **changes})


def reranker(folder: Path) -> Any:
    """A cross-encoder: one class."""
    return _saved(
        folder, lambda: transformers.BertForSequenceClassification(bert(num_labels=1)), _write_words
    )


def classifier(folder: Path) -> Any:
    labels = {"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}}
    return _saved(folder, lambda: transformers.BertForSequenceClassification(bert(**labels)), _write_words)


def masked(folder: Path) -> Any:
    return _saved(folder, lambda: transformers.BertForMaskedLM(bert()), _write_words)


def embedding_decoder(folder: Path) -> Any:
    """As Qwen3-Embedding: a decoder whose last token is pooled, with prompts."""
    changes = {"vocab_size": len(WORDS), "tie_word_embeddings": True, "max_position_embeddings": 40}
    model = _saved(folder, lambda: transformers.Qwen3ForCausalLM(qwen3(**changes)), _write_words)
    kinds = (("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize"))
    modules = [
        {"idx": int(idx), "name": idx, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, path, kind in kinds
    ]
    (folder / "1_Pooling").mkdir()
    prompts = {"prompts": {"query": "what is the cat ? ", "document": ""}, "default_prompt_name": None}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True},
        "config_sentence_transformers.json": prompts,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return model


def tokenizer_of(folder: Path) -> Any:
    return transformers.BertTokenizer(str(folder / "vocab.txt"))


def _saved(folder: Path, make: Callable[[], Any], write: Callable[[Path], None]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(folder)
    write(folder)
    return model


def _write_words(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    names = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "unk": "[UNK]", "pad": "[PAD]"}
    config = {"do_lower_case": True, **{f"{name}_token": token for name, token in names.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
