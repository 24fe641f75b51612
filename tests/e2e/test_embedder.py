"""The built-in encoder against transformers, and `Embedder` as people use it."""

from collections.abc import Iterator

import numpy
import pytest
import torch
import transformers

from quire import Embedder
from quire.core.errors import InvalidRequest, ModelError, WeightsError
from quire.llm.llm import LLM
from quire.weights.builtin import builtin_encoder_folder

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Hi",
    "",
    "Wie heißt die Hauptstadt von Frankreich? 東京は日本の首都です。 🦊",
    "A paged pool keeps attention's memory in blocks. " * 40,
]


@pytest.fixture(scope="module")
def folder() -> str:
    try:
        return str(builtin_encoder_folder())
    except WeightsError as error:
        pytest.skip(f"the built-in encoder is not here and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def embedder(folder: str) -> Iterator[Embedder]:
    with Embedder(use_tqdm=False) as made:
        yield made


@pytest.fixture(scope="module")
def reference(folder: str) -> numpy.ndarray:
    """Mean over the tokens, of length one, as the model's card has it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    vectors = []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=256, padding=False, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(model(**inputs).last_hidden_state[0].mean(0))
    return torch.nn.functional.normalize(torch.stack(vectors)).numpy()


def test_fp32_gives_the_vectors_of_transformers(folder: str, reference: numpy.ndarray) -> None:
    with Embedder(folder, quantization="none", use_tqdm=False) as exact:
        vectors = exact.embed(TEXTS, use_tqdm=False, truncate=True)
    assert vectors.shape == (len(TEXTS), 384)
    assert (vectors * reference).sum(axis=1).min() > 0.99999


def test_int8_stays_within_a_thousandth_for_sentences(embedder: Embedder, reference: numpy.ndarray) -> None:
    assert embedder.report.precision.format_name == "int8"
    vectors = embedder.embed(TEXTS, use_tqdm=False, truncate=True)
    cosines = (vectors * reference).sum(axis=1)
    assert cosines[[0, 3, 4]].min() > 0.999
    assert cosines.min() > 0.998  # a word alone, or none, has no neighbours to average with


def test_a_texts_vector_has_the_same_bits_in_any_batch(embedder: Embedder) -> None:
    together = embedder.embed(TEXTS[:4] * 30, use_tqdm=False)
    for position, text in enumerate(TEXTS[:4]):
        alone = embedder.embed(text, use_tqdm=False)
        assert (together[position::4] == alone).all()


def test_near_texts_lie_nearer_than_far_ones(embedder: Embedder) -> None:
    question, answer, other = embedder.embed(
        ["What is the capital of France?", "Paris is France's capital.", "Bake the bread for an hour."],
        use_tqdm=False,
    )
    assert question @ answer > 0.7 > 0.2 > question @ other


def test_vectors_may_be_shortened_and_texts_cut(embedder: Embedder) -> None:
    short = embedder.embed(TEXTS[:2], use_tqdm=False, dimensions=32)
    whole = embedder.embed(TEXTS[:2], use_tqdm=False)[:, :32]
    numpy.testing.assert_allclose(short, whole / numpy.linalg.norm(whole, axis=1, keepdims=True), rtol=1e-6)
    with pytest.raises(InvalidRequest, match="outside 1 to 384"):
        embedder.embed("a", use_tqdm=False, dimensions=385)
    with pytest.raises(InvalidRequest, match="dimensions='32' is outside 1 to 384"):
        embedder.embed("a", use_tqdm=False, dimensions="32")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"tokens and this model takes 256"):
        embedder.embed(TEXTS, use_tqdm=False)
    assert not embedder.engine.has_work
    assert embedder.embed([], use_tqdm=False).shape == (0, 384)


def test_a_model_that_embeds_does_not_generate(folder: str) -> None:
    with pytest.raises(ModelError, match="BertModel is an encoder"):
        LLM(folder, use_tqdm=False)
