"""Engines in one process, in threads of their own: each gives what it gives alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from quire import LLM, Embedder, SamplingParams
from quire.core.errors import WeightsError

BATCHES = range(1, 9)  # a decode of each new batch size is recorded, and copies blocks that its samples share


def _engine() -> LLM:
    return LLM(num_blocks=300, use_tqdm=False)


def _samples(llm: LLM, seed: int) -> list[list[int]]:
    """Token ids of seeded samples, three per prompt, in batches of growing size."""
    results = []
    for size in BATCHES:
        prompts = [f"Tell me about the number {number} and {seed}:" for number in range(size)]
        sampling = SamplingParams(n=3, max_tokens=6, seed=1000 * seed + size, ignore_eos=True)
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            results += [list(sample.token_ids) for sample in output.outputs]
    return results


def test_two_engines_at_once_give_what_each_gives_alone() -> None:
    with _engine() as first, _engine() as second, ThreadPoolExecutor(2) as threads:
        together = list(threads.map(_samples, (first, second), (1, 2)))
        later = [_samples(first, 1), _samples(second, 2)]  # what was recorded meanwhile is replayed now
    with _engine() as alone:
        expected = [_samples(alone, 1), _samples(alone, 2)]
    assert together == expected
    assert later == expected


def test_an_embedder_beside_an_engine_gives_what_it_gives_alone() -> None:
    texts = [f"Sentence number {number} about the weather." for number in range(4)]
    try:
        embedder = Embedder(use_tqdm=False)
    except WeightsError as error:
        pytest.skip(f"the built-in encoder is not here and cannot be fetched: {error}")
    with embedder, _engine() as llm, ThreadPoolExecutor(1) as thread:
        embed: Callable[[], numpy.ndarray] = lambda: embedder.embed(texts, use_tqdm=False)
        expected = embed()
        generating = thread.submit(_samples, llm, 3)
        vectors = [embed()]
        while not generating.done():
            vectors.append(embed())
    with _engine() as alone:
        assert generating.result() == _samples(alone, 3)
    assert all(numpy.array_equal(got, expected) for got in vectors)
