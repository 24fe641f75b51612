"""Engines in one process, in threads of their own: each gives what it gives alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from quire import LLM, Embedder, SamplingParams
from quire.core.errors import WeightsError
from quire.kernels import native

BATCHES = range(1, 9)  # a decode of each new batch size is recorded, and copies blocks that its samples share


def _engine() -> LLM:
    return LLM(num_blocks=300, use_tqdm=False)


def _embedder(**settings: int) -> Embedder:
    try:
        return Embedder(use_tqdm=False, **settings)
    except WeightsError as error:
        pytest.skip(f"the built-in encoder is not here and cannot be fetched: {error}")


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
    with _embedder() as embedder, _engine() as llm, ThreadPoolExecutor(1) as thread:
        embed: Callable[[], numpy.ndarray] = lambda: embedder.embed(texts, use_tqdm=False)
        expected = embed()
        generating = thread.submit(_samples, llm, 3)
        vectors = [embed()]
        while not generating.done():
            vectors.append(embed())
    with _engine() as alone:
        assert generating.result() == _samples(alone, 3)
    assert all(numpy.array_equal(got, expected) for got in vectors)


def test_engines_of_one_process_keep_their_own_numbers_of_threads() -> None:
    """Of the thread that runs the forward passes: the runner's, or an encoder's caller."""
    sizes = {"use_tqdm": False, "num_blocks": 16, "max_num_seqs": 2, "max_model_len": 64}
    asked = SamplingParams(temperature=0.0, max_tokens=32)
    with LLM(num_threads=1, **sizes) as one, _embedder(num_threads=3) as embedder:
        alone = one.generate("One, two,", asked, use_tqdm=False)[0].outputs[0].token_ids
        with LLM(num_threads=2, **sizes) as two:
            for llm in (two, one):
                assert llm.generate("One, two,", asked, use_tqdm=False)[0].outputs[0].token_ids == alone
            threads = [llm.engine._runner._ops.submit(native.num_threads).result() for llm in (one, two)]
            embedder.embed("text", use_tqdm=False)
            assert [*threads, native.num_threads()] == [1, 2, 3]
            assert [llm.report.start.num_threads for llm in (one, two, embedder)] == [1, 2, 3]
