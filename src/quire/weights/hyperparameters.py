"""Reads values of config.json, a classifier's classes among them. A value that is missing or makes no sense is refused
by its name, before it is used."""

import math
from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig
from quire.core.errors import ModelError

DTYPES = ("float32", "float16", "bfloat16")
MAX_SIZE = 2**31 - 1  # sizes, positions and token ids are 32-bit numbers in every kernel
MAX_LAYERS = 4096  # far more than any model has; each costs time before its weights are looked for
# What most config.json files call the sizes of a ModelConfig.
SIZES = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "max_position": "max_position_embeddings",
}


def model_config(
    architecture: str, hf: Mapping[str, Any], names: Mapping[str, str] = SIZES, **given: Any
) -> ModelConfig:
    """The ModelConfig of a config.json. `names`: of sizes that have other ones there; `given` fields are not read."""
    fields: dict[str, Any] = {
        field: positive(hf, name, high=MAX_LAYERS if field == "num_layers" else MAX_SIZE)
        for field, name in {**SIZES, **names}.items()
        if field not in given
    } | given
    num_heads = fields["num_heads"]
    num_kv_heads = fields.setdefault("num_kv_heads", num_heads)
    if num_heads % num_kv_heads != 0:
        raise ModelError(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    if "head_dim" not in fields:
        fields["head_dim"] = head_size({}, fields["hidden_size"], num_heads)
    return ModelConfig(architecture=architecture, dtype=checkpoint_dtype(hf), hf=dict(hf), **fields)


def generates(hf: Mapping[str, Any], tied: bool = False) -> dict[str, Any]:
    """The fields of a model that generates; `tied`: whether its output head is, where config.json does not say."""
    return {
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", tied)),
        "eos_token_ids": token_ids(hf, "eos_token_id"),
        "bos_token_id": first_token_id(hf, "bos_token_id"),
    }


def positive(hf: Mapping[str, Any], name: str, default: int | None = None, high: int = MAX_SIZE) -> int:
    """A whole number from 1 to `high`."""
    return whole(hf, name, default, 1, high)


def whole(
    hf: Mapping[str, Any], name: str, default: int | None = None, low: int = 0, high: int = MAX_SIZE
) -> int:
    """A whole number from `low` to `high`; null is the default."""
    value = hf.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {name}: add it, or take the model's own config.json")
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(
            f"config.json has {name}={value!r}, which must be a whole number of at least {low} and at most {high}: "
            "correct it, or take the model's own config.json"
        )
    return value


def number(hf: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number above 0, such as an epsilon or a rope setting; null is the default."""
    value = hf.get(name)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(
            f"config.json has {name}={value!r}, which must be a number above 0: correct it, or take the model's own "
            "config.json"
        )
    return float(value)


def head_size(hf: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    """`head_dim`, or hidden_size / num_heads where that divides."""
    if hf.get("head_dim") is not None:
        return positive(hf, "head_dim")
    if hidden_size % num_heads != 0:
        raise ModelError(f"hidden size {hidden_size} is not a multiple of {num_heads} heads: give head_dim")
    return hidden_size // num_heads


def checkpoint_dtype(hf: Mapping[str, Any]) -> str:
    """The type that the checkpoint says it has; float32 where it says nothing that we know."""
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPES else "float32"


def token_ids(hf: Mapping[str, Any], name: str, where: str = "config.json") -> tuple[int, ...]:
    """One id, several, or none. Old files write -1 for none."""
    value = hf.get(name)
    values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    for token_id in values:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id > MAX_SIZE:
            raise ModelError(
                f"{where} has {name}={value!r}, which must be token ids: whole numbers of at most {MAX_SIZE}"
            )
    return tuple(token_id for token_id in values if token_id >= 0)


def first_token_id(hf: Mapping[str, Any], name: str) -> int | None:
    return next(iter(token_ids(hf, name)), None)


# ---------------------------------------------------------------------- classes of a classifier

MAX_LABELS = 65_536
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}  # of torch, by class
_PROBLEMS = {
    "regression": "none",
    "single_label_classification": None,  # by the number of classes
    "multi_label_classification": "sigmoid",
}


def read_labels(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in the order of the classifier's rows; two, LABEL_0 and LABEL_1, where config.json has none."""
    named = hf.get("id2label")
    if named is None:
        count = positive(hf, "num_labels", 2, MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(named, Mapping) or not 1 <= len(named) <= MAX_LABELS:
        raise ModelError(
            f"config.json has id2label={named!r:.80}, which must be an object of 1 to {MAX_LABELS} names: correct it"
        )
    labels = [named.get(str(i), named.get(i)) for i in range(len(named))]
    if None in labels:
        missing = labels.index(None)
        raise ModelError(
            f"config.json has an id2label of {len(named)} names without {missing}: number them from 0"
        )
    return tuple(map(str, labels))


def score_activation(hf: Mapping[str, Any]) -> str:
    """softmax, sigmoid or none: as sentence-transformers wrote it, as problem_type says, else by the number of
    classes, sigmoid for one and softmax for more."""
    written = hf.get("sbert_ce_default_activation_function")
    section = hf.get("sentence_transformers")
    if isinstance(section, Mapping):
        written = section.get("activation_fn") or written
    if written is not None:
        kind = str(written).rpartition(".")[2].partition("(")[0]
        if kind not in _ACTIVATIONS:
            raise ModelError(
                f"config.json asks for the activation {written!r} of scores, which is not known: choose "
                f"{', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[kind]
    by_number = "sigmoid" if len(read_labels(hf)) == 1 else "softmax"
    problem = hf.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise ModelError(
            f"config.json has problem_type={problem!r}, which is not known: choose one of {', '.join(_PROBLEMS)}"
        )
    return _PROBLEMS.get(str(problem)) or by_number
