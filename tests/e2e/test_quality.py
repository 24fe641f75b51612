"""What int8 costs in quality: perplexity on the XQuAD paragraphs, 512-token windows; KL of an int8 KV cache."""

import json
import math

from quire import LLM, SamplingParams
from quire.text.load import load_tokenizer
from quire_lab.benchmarks.kv_quality import Divergence, Scored

WINDOW = 512
NUM_WINDOWS = 16  # quire_lab.benchmarks.perplexity runs all of them


def windows(llm: LLM, shared) -> list[list[int]]:
    articles = json.loads((shared / "data" / "xquad" / "xquad.en.json").read_text())["data"]
    text = "\n\n".join(p["context"] for article in articles for p in article["paragraphs"])
    token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
    return [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW, WINDOW)]


def perplexity(llm: LLM, pieces: list[list[int]]) -> float:
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    results = llm.generate([{"prompt_token_ids": piece} for piece in pieces], scored, use_tqdm=False)
    logprobs = [
        position[token_id].logprob
        for result in results
        for position, token_id in zip(result.prompt_logprobs, result.prompt_token_ids, strict=True)
        if position is not None
    ]
    assert len(logprobs) == len(pieces) * (WINDOW - 1)
    return math.exp(-sum(logprobs) / len(logprobs))


def test_int8_perplexity_is_within_one_percent_of_fp32(shared, llm, record_property):
    pieces = windows(llm, shared)[:NUM_WINDOWS]
    with LLM(use_tqdm=False, quantization="none", num_blocks=400, max_num_seqs=4) as full:
        exact = perplexity(full, pieces)
    quantized = perplexity(llm, pieces)
    record_property("perplexity", f"fp32 {exact:.3f}, int8 {quantized:.3f}")
    assert abs(quantized / exact - 1.0) < 0.01


def test_an_int8_kv_cache_is_near_a_16_bit_one(shared, record_property):
    """The built-in model in full precision, six contexts; quire_lab.benchmarks.kv_quality takes fifty."""
    articles = json.loads((shared / "data" / "xquad" / "xquad.en.json").read_text())["data"]
    scored, found = Scored(None, "none"), Divergence()
    tokenizer = load_tokenizer(scored.plan.source)
    for paragraph in articles[0]["paragraphs"][:3] + articles[1]["paragraphs"][:3]:
        token_ids = tokenizer.encode(paragraph["context"])
        found.add(scored.log_probabilities(token_ids, "float16"), scored.log_probabilities(token_ids, "int8"))
    record_property("kl", found.record()["mean_kl"])
    assert found.record()["mean_kl"] <= 0.002
