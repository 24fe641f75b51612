"""Classes of a classifier: their names, and what makes probabilities of scores."""

from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.weights.hyperparameters import MAX_LABELS, read_labels, score_activation


def test_names_come_in_the_order_of_their_numbers() -> None:
    assert read_labels({"id2label": {"1": "b", "0": "a"}}) == ("a", "b")
    assert read_labels({}) == ("LABEL_0", "LABEL_1")
    assert read_labels({"num_labels": 1}) == ("LABEL_0",)


@pytest.mark.parametrize(
    ("hf", "kind"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "none",
        ),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
    ],
)
def test_scores_become_probabilities_as_the_config_says(hf: dict[str, Any], kind: str) -> None:
    assert score_activation(hf) == kind


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"id2label": ["a"]}, "id2label"),
        ({"id2label": {}}, "id2label"),
        ({"id2label": {"0": "a", "2": "b"}}, "without 1: number them from 0"),
        ({"num_labels": MAX_LABELS + 1}, f"num_labels.*at most {MAX_LABELS}"),
        ({"problem_type": "ranking"}, "problem_type='ranking'"),
        ({"sbert_ce_default_activation_function": "torch.nn.Tanh"}, "Tanh.*Sigmoid"),
    ],
)
def test_what_makes_no_sense_is_named(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        score_activation(hf)  # which reads the names
