"""`Embedder` with classifiers, rerankers, masked words and decoders, against transformers."""

from pathlib import Path

import numpy
import pytest
import torch
import transformers

from quire import Embedder
from quire.core.errors import InvalidRequest
from quire.text.encoder_texts import MAX_PREDICTIONS
from tests.models import encoder_folders as folders

TEXTS = ["the cat sat on the mat .", "a dog", "what is a red cat ? the blue dog runs"]
QUERY = "what is a cat ?"


def exact(folder: Path) -> Embedder:
    return Embedder(str(folder), quantization="none", use_tqdm=False)


@torch.inference_mode()
def pair_scores(
    reference: object, folder: Path, pairs: list[tuple[str, str]], **settings: object
) -> list[float]:
    tokenizer, scores = folders.tokenizer_of(folder), []
    for first, second in pairs:
        inputs = tokenizer(first, second, return_tensors="pt", **settings)
        scores.append(float(reference(**inputs).logits.sigmoid()))  # type: ignore[operator]
    return scores


def test_a_classifier_gives_the_probabilities_of_transformers(tmp_path: Path) -> None:
    reference = folders.classifier(tmp_path)
    tokenizer = folders.tokenizer_of(tmp_path)
    with exact(tmp_path) as model:
        answers = model.classify(TEXTS, use_tqdm=False)
        for text, answer in zip(TEXTS, answers, strict=True):
            with torch.inference_mode():
                right = reference(**tokenizer(text, return_tensors="pt")).logits.softmax(1)[0]
            numpy.testing.assert_allclose(answer.probs, right, rtol=1e-4, atol=1e-5)
            assert answer.label == folders.LABELS[int(right.argmax())]
        assert model.classify([], use_tqdm=False) == []
        for wrong in (lambda: model.embed("a"), lambda: model.score("a", "b"), lambda: model.fill_mask("a")):
            with pytest.raises(InvalidRequest, match=r"makes class scores: use classify$"):
                wrong()


def test_a_reranker_scores_pairs_as_transformers_does_cut_ones_too(tmp_path: Path) -> None:
    reference = folders.reranker(tmp_path)
    long = " ".join(["the red cats ran on"] * 9)
    pairs = [(QUERY, text) for text in (*TEXTS, long)] + [(long, "a dog"), (long, long)]
    with exact(tmp_path) as model:
        scores = model.score(QUERY, TEXTS, use_tqdm=False)
        numpy.testing.assert_allclose(scores, pair_scores(reference, tmp_path, pairs[:3]), rtol=1e-4)
        with pytest.raises(InvalidRequest, match=r"input\[0\] has \d+ tokens and this model takes 40"):
            model.score(QUERY, long, use_tqdm=False)
        cut = model.score(*map(list, zip(*pairs, strict=True)), use_tqdm=False, truncate=True)
        right = pair_scores(reference, tmp_path, pairs, truncation=True, max_length=40)
        numpy.testing.assert_allclose(cut, right, rtol=1e-4)
        ranked = model.rerank(QUERY, TEXTS, top_n=2, use_tqdm=False)
        assert [document.index for document in ranked] == numpy.argsort(-scores).tolist()[:2]
        assert model.rerank(QUERY, [], use_tqdm=False) == []
        with pytest.raises(InvalidRequest, match="2 first and 3 second"):
            model.score(TEXTS[:2], TEXTS)


def test_masked_words_get_the_predictions_of_transformers(tmp_path: Path) -> None:
    reference = folders.masked(tmp_path)
    pipeline = transformers.pipeline(
        "fill-mask", model=reference, tokenizer=folders.tokenizer_of(tmp_path), device="cpu"
    )
    texts = ["the [MASK] sat .", "a [MASK] [MASK] ran on the mat"]
    with exact(tmp_path) as model:
        once, twice = model.fill_mask(texts, top_k=3, use_tqdm=False)
        for ours, theirs in ((once, [pipeline(texts[0], top_k=3)]), (twice, pipeline(texts[1], top_k=3))):
            for row, right in zip(ours, theirs, strict=True):
                assert [token.token for token in row] == [token["token"] for token in right]
                assert [token.token_str for token in row] == [token["token_str"] for token in right]
                scores = [token["score"] for token in right]
                numpy.testing.assert_allclose([token.score for token in row], scores, rtol=1e-4)
        assert [token.sequence for token in once[0]] == [t["sequence"] for t in pipeline(texts[0], top_k=3)]
        assert [token.sequence for token in twice[1]] == [
            t["sequence"] for t in pipeline(texts[1], top_k=3)[1]
        ]
        assert model.embed(texts, use_tqdm=False).shape == (2, 32)  # it embeds, too
        for wrong, message in (
            (lambda: model.fill_mask("the cat"), r"input\[0\] has no mask token: put \[MASK\]"),
            (lambda: model.fill_mask(texts, top_k=0), "top_k=0 is outside 1 to 21"),
            (lambda: model.fill_mask(texts, top_k=22), "top_k=22 is outside 1 to 21"),
            (lambda: model.fill_mask(["[MASK] " * 30] * 2, top_k=20), f"may have {MAX_PREDICTIONS}"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                wrong()


def test_a_decoder_of_sentence_transformers_gives_its_last_token_behind_a_prompt(tmp_path: Path) -> None:
    reference = folders.embedding_decoder(tmp_path).model
    tokenizer = folders.tokenizer_of(tmp_path)
    with exact(tmp_path) as model:
        vectors = model.embed(TEXTS, use_tqdm=False)
        prompted = model.embed(TEXTS[0], use_tqdm=False, prompt_name="query")
        cosines = model.score(TEXTS[0], TEXTS, use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"prompt_name='x' is none .*query, document"):
            model.embed("a", prompt_name="x")
    texts = [*TEXTS, f"what is the cat ? {TEXTS[0]}"]
    for vector, text in zip([*vectors, prompted[0]], texts, strict=True):
        with torch.inference_mode():
            right = reference(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
        right = torch.nn.functional.normalize(right.last_hidden_state[0, -1], dim=0)
        numpy.testing.assert_allclose(vector, right, rtol=1e-4, atol=1e-5)
    numpy.testing.assert_allclose(cosines, vectors @ vectors[0], rtol=1e-5)


def test_int8_scores_stay_near(tmp_path: Path, empty_cache: Path) -> None:
    folders.reranker(tmp_path / "model")
    with exact(tmp_path / "model") as full, Embedder(str(tmp_path / "model"), use_tqdm=False) as int8:
        distance = full.score(QUERY, TEXTS, use_tqdm=False) - int8.score(QUERY, TEXTS, use_tqdm=False)
    assert numpy.abs(distance).max() < 0.05
