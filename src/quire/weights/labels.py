"""Classes of a classifier, from config.json: their names, and how scores become probabilities."""

from collections.abc import Mapping
from typing import Any

from quire.core.errors import ModelError
from quire.weights.hyperparameters import positive

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
