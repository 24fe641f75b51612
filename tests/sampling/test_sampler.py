"""The sampler against the oracle, feature by feature and all at once."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.sampling import SamplingParams
from quire.sampling.columns import Purpose, stream_key, uniforms
from quire.sampling.logprobs import logprob_entries
from quire.sampling.records import SampleRequests, TokenMask
from quire.sampling.sampler import Sampler
from tests.sampling.oracle import Case, batch_of, edited_logits, raw_logprobs, weights_of

VOCAB = 37
QUIET = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))

token_ids = st.integers(0, VOCAB - 1)
half = st.booleans()


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    def either(strategy: st.SearchStrategy, otherwise: object) -> object:
        return draw(strategy) if draw(half) else otherwise

    return SamplingParams(
        temperature=either(st.sampled_from([0.3, 0.8, 1.0, 2.5]), 0.0),
        top_k=either(st.integers(1, 50), 0),
        top_p=either(st.floats(0.05, 0.99), 1.0),
        min_p=either(st.floats(0.01, 0.5), 0.0),
        repetition_penalty=either(st.floats(0.5, 2.0), 1.0),
        presence_penalty=either(st.floats(-2, 2), 0.0),
        frequency_penalty=either(st.floats(-2, 2), 0.0),
        logit_bias=either(st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=4), {}),
        bad_words_token_ids=either(
            st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple), ()
        ),
        allowed_token_ids=either(st.lists(token_ids, min_size=1, max_size=20).map(tuple), None),
        min_tokens=either(st.integers(1, 8), 0),
        logprobs=either(st.integers(0, 20), None),
    )


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    sampling = draw(parameters())
    history = tuple(draw(st.lists(token_ids, min_size=1, max_size=24)))
    if sampling.bad_words_token_ids and draw(half):  # random histories hardly ever end in a bad word's start
        history += sampling.bad_words_token_ids[0][:-1]
    return Case(
        sampling,
        history,
        num_prompt_tokens=draw(st.integers(1, len(history))),
        logits=logits_of(draw(st.integers(0, 10_000))),
        seed=draw(st.integers(0, 2**64 - 1)),
        sample_index=draw(st.integers(0, 3)),
        stop_token_ids=tuple(draw(st.lists(token_ids, max_size=3))),
    )


def check_token(case: Case, token_id: int, finite: bool) -> None:
    """The chosen token is the oracle's, unless its decision was within rounding of another."""
    edited = edited_logits(case)
    assert finite == bool(np.isfinite(edited).any())
    if not finite:
        assert token_id == 0
    elif case.sampling.greedy:
        assert token_id == int(edited.argmax())
    else:
        weights, margin = weights_of(case)
        if margin < 1e-5:
            return
        key = np.array([stream_key(case.seed, case.sample_index, Purpose.TOKEN)], np.uint64)
        point = float(uniforms(key, np.array([len(case.history)]))[0]) * weights.sum()
        ends = weights.cumsum()
        assert weights[token_id] > 0
        assert ends[token_id] - weights[token_id] - 1e-5 <= point <= ends[token_id] + 1e-5


@QUIET
@given(cases=st.lists(any_case(), min_size=1, max_size=6))
def test_everything_at_once_equals_the_oracle(sampler: Sampler, cases: list[Case]) -> None:
    logits, requests = batch_of(cases)
    sampled = sampler(logits, requests)
    entries = logprob_entries(sampled) or (None,) * len(cases)
    for index, case in enumerate(cases):
        token_id, finite = int(sampled.token_ids[index]), bool(sampled.finite[index])
        check_token(case, token_id, finite)
        entry = entries[index]
        assert (entry is None) == (case.sampling.logprobs is None)
        if entry is not None:
            expected = raw_logprobs(case)
            best = np.argsort(-expected, kind="stable")[: case.sampling.logprobs]
            assert entry.token_id == token_id
            assert entry.logprob == pytest.approx(expected[token_id], abs=1e-5)
            assert entry.rank == 1 + int((case.logits > case.logits[token_id]).sum())
            assert list(entry.top_ids) == best.tolist()
            assert entry.top_logprobs == pytest.approx(expected[best], abs=1e-5)
            assert all(
                logprob == entry.logprob
                for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                if top_id == token_id
            )


@QUIET
@given(cases=st.lists(any_case(), min_size=2, max_size=8), shuffle=st.randoms(use_true_random=False))
def test_a_row_never_depends_on_its_neighbours(sampler: Sampler, cases: list[Case], shuffle) -> None:
    def run(chosen: list[Case], rows: list[int] | None = None) -> list[tuple]:
        logits, requests = batch_of(chosen, rows=rows)
        sampled = sampler(logits, requests)
        entries = logprob_entries(sampled) or (None,) * len(chosen)
        return list(zip(sampled.token_ids.tolist(), sampled.finite.tolist(), entries, strict=True))

    together = run(cases)
    assert [run([case], rows=[3])[0] for case in cases] == together
    order = list(range(len(cases)))
    shuffle.shuffle(order)
    rows = shuffle.sample(range(20), len(cases))
    assert run([cases[index] for index in order], rows) == [together[index] for index in order]


@pytest.mark.parametrize("vocab", [49152, 50257])  # a multiple of every vector's width, and of none
def test_neighbours_do_not_matter_at_real_sizes(sampler: Sampler, vocab: int) -> None:
    kinds = [
        SamplingParams(temperature=0, logprobs=5),
        SamplingParams(temperature=0.8, top_p=0.95, logprobs=5),
        SamplingParams(temperature=1.0, logprobs=5),
        SamplingParams(temperature=0.7, top_k=50, min_p=0.02, repetition_penalty=1.3, logprobs=5),
    ]
    cases = [
        Case(kind, (1, 2, 3, index), 2, logits_of(index, vocab), seed=index)
        for index, kind in enumerate(kinds)
    ]
    logits, requests = batch_of(cases)
    together = sampler(logits, requests)
    entries = logprob_entries(together)
    for index, case in enumerate(cases):
        logits, requests = batch_of([case])
        alone = sampler(logits, requests)
        assert alone.token_ids[0] == together.token_ids[index]
        assert logprob_entries(alone)[0] == entries[index]


def test_greedy_ties_go_to_the_lowest_id(sampler: Sampler) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[30, 11, 25]] = 4.0
    cases = [Case(SamplingParams(temperature=0), (1,), 1, logits)] * 3
    assert sampler(*batch_of(cases)).token_ids.tolist() == [11, 11, 11]


def test_filters_keep_ties_lowest_id_first(sampler: Sampler) -> None:
    """Eight equal tokens, room for three: the first three, and no other, come up."""
    logits = np.zeros(8, np.float32)
    for sampling in (SamplingParams(top_k=3), SamplingParams(top_p=0.3)):
        cases = [Case(sampling, (1,), 1, logits, seed=seed) for seed in range(200)]
        assert set(sampler(*batch_of(cases)).token_ids.tolist()) == {0, 1, 2}


def test_penalty_semantics(sampler: Sampler) -> None:
    """Repetition counts the prompt; presence and frequency the output alone."""
    logits = np.array([1.0, 5.0, 4.9, 4.8, 0.0], np.float32)

    def chosen(history: tuple[int, ...], **values: float) -> int:
        case = Case(SamplingParams(temperature=0, **values), history, 1, logits)
        return int(sampler(*batch_of([case])).token_ids[0])

    assert chosen((1,), repetition_penalty=1.5) == 2
    assert chosen((1,), presence_penalty=1.0) == 1
    assert chosen((0, 1), presence_penalty=1.0) == 2
    assert chosen((0, 1, 2), frequency_penalty=0.15) == 1
    assert chosen((0, 1, 2, 1), frequency_penalty=0.15) == 3
    assert chosen((0, 3), presence_penalty=-1.0) == 3


def test_penalties_take_more_rows_than_one_pass(sampler: Sampler) -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.1)
    generator = np.random.default_rng(4)
    cases = [
        Case(sampling, tuple(generator.integers(0, VOCAB, 1 + index % 40).tolist()), 1, logits_of(index))
        for index in range(75)
    ]
    got = sampler(*batch_of(cases)).token_ids.tolist()
    assert got == [int(edited_logits(case).argmax()) for case in cases]


def test_bad_words_ban_the_last_token_only_after_the_others(sampler: Sampler) -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    sampling = SamplingParams(temperature=0, bad_words_token_ids=((1, 2, 3), (0, 0, 0, 0, 0, 0, 3)))

    def chosen(*history: int) -> int:
        return int(sampler(*batch_of([Case(sampling, history, 1, logits)])).token_ids[0])

    assert [chosen(1, 2), chosen(0, 1, 2), chosen(2), chosen(1, 2, 0), chosen(0)] == [2, 2, 3, 3, 3]


def test_bad_words_of_many_lengths_cost_what_they_are_long(sampler: Sampler) -> None:
    """One word of 60 tokens among 1,000 short ones makes none of them longer."""
    short = tuple((token_id % VOCAB, token_id // VOCAB, 5) for token_id in range(1000))
    long = (*(1,) * 59, 6)
    sampling = SamplingParams(temperature=0, bad_words_token_ids=(*short, long))
    histories = [(1,) * 58, (1,) * 59, (0,) * 62, (2, 3, 1)]
    tensor, requests = batch_of([Case(sampling, history, 1, logits_of(9)) for history in histories])
    edits = requests.columns.edits[0]
    assert edits is not None
    assert sum(words.prefixes.size for words in edits.bad_sequences) == 2 * len(short) + 59
    assert all(one is edits for one in requests.columns.edits[: len(histories)])  # made once for all of them
    expected = [
        int(edited_logits(Case(sampling, history, 1, logits_of(9))).argmax()) for history in histories
    ]
    assert sampler(tensor, requests).token_ids.tolist() == expected


def test_a_row_that_cannot_be_started_fails_alone(sampler: Sampler) -> None:
    tensor, requests = batch_of(
        [Case(SamplingParams(temperature=0), (1,), 1, logits_of(1)) for _ in range(2)]
    )
    requests.columns.ban_row(0)
    sampled = sampler(tensor, requests)
    assert sampled.finite.tolist() == [False, True]
    assert sampled.token_ids.tolist()[1] == int(logits_of(1).argmax())


def test_long_lists_of_stop_tokens_wait_too(sampler: Sampler) -> None:
    logits = np.arange(9000, dtype=np.float32)
    sampling = SamplingParams(temperature=0, min_tokens=1)
    cases = [
        Case(sampling, (0,) * length, 2, logits, stop_token_ids=tuple(range(3000, 9000))) for length in (2, 3)
    ]
    assert sampler(*batch_of(cases)).token_ids.tolist() == [2999, 8999]


def test_stop_tokens_wait_for_min_tokens(sampler: Sampler) -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    sampling = SamplingParams(temperature=0, min_tokens=2)
    cases = [Case(sampling, (0,) * (2 + n), 2, logits, stop_token_ids=(3, 2, 99)) for n in range(4)]
    assert sampler(*batch_of(cases)).token_ids.tolist() == [1, 1, 3, 3]


def test_an_outside_mask_joins_the_rows_own(sampler: Sampler) -> None:
    logits = logits_of(1, 70)
    allowed = SamplingParams(temperature=0, allowed_token_ids=tuple(range(0, 70, 2)))
    cases = [Case(SamplingParams(temperature=0, logprobs=0), (1,), 1, logits), Case(allowed, (1,), 1, logits)]
    tensor, requests = batch_of(cases * 2)
    bits = np.zeros((2, 3), np.uint32)
    for token_id in range(60, 70):
        bits[:, token_id // 32] |= np.uint32(1 << token_id % 32)
    mask = TokenMask(np.array([2, 3]), bits)
    sampled = sampler(
        tensor,
        SampleRequests(requests.rows, requests.positions, requests.columns, requests.token_ids, mask),
    )
    even = 60 + 2 * int(logits[60::2].argmax())
    assert sampled.token_ids.tolist() == [
        int(logits.argmax()), 2 * int(logits[::2].argmax()), 60 + int(logits[60:].argmax()), even,
    ]  # fmt: skip
    entry = logprob_entries(sampled)[2]
    assert entry is not None
    assert entry.logprob == pytest.approx(raw_logprobs(cases[0])[entry.token_id], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 3}])
def test_a_row_that_cannot_be_sampled_fails_alone(
    sampler: Sampler, temperature: float, filters: dict
) -> None:
    good = logits_of(2)
    nan, infinite, empty = good.copy(), good.copy(), np.full(VOCAB, -np.inf, np.float32)
    nan[5], infinite[7] = np.nan, np.inf
    partly = good.copy()
    partly[:30] = -np.inf  # a model may rule tokens out: still a distribution
    sampling = SamplingParams(temperature=temperature, **filters)
    rows = [good, nan, good, infinite, empty, partly, np.full(VOCAB, np.nan, np.float32)]
    cases = [Case(sampling, (1, 2), 1, row, seed=9) for row in rows]
    sampled = sampler(*batch_of(cases))
    assert sampled.finite.tolist() == [True, False, True, False, False, True, False]
    for index in (0, 2, 5):
        check_token(cases[index], int(sampled.token_ids[index]), True)
    assert all(int(sampled.token_ids[index]) == 0 for index in (1, 3, 4, 6))
    logprob_entries(sampled)


def test_all_tokens_banned_is_a_failed_row(sampler: Sampler) -> None:
    everything = tuple((token_id,) for token_id in range(VOCAB))
    cases = [
        Case(SamplingParams(temperature=t, bad_words_token_ids=words), (1,), 1, logits_of(3))
        for t in (0.0, 1.0)
        for words in (everything, everything[1:])
    ]
    sampled = sampler(*batch_of(cases))
    assert sampled.finite.tolist() == [False, True, False, True]
    assert sampled.token_ids.tolist() == [0, 0, 0, 0]


def test_extreme_temperatures(sampler: Sampler) -> None:
    logits = logits_of(5, spread=10.0)
    cold = [Case(SamplingParams(temperature=2e-5), (1,), 1, logits, seed=seed) for seed in range(50)]
    assert set(sampler(*batch_of(cold)).token_ids.tolist()) == {int(logits.argmax())}
    hot = [Case(SamplingParams(temperature=100.0), (1,), 1, logits, seed=seed) for seed in range(400)]
    sampled = sampler(*batch_of(hot))
    assert sampled.finite.all()
    assert len(set(sampled.token_ids.tolist())) > VOCAB * 0.9
    vast = np.where(np.arange(VOCAB) == 4, 1e30, -1e30).astype(np.float32)
    cases = [Case(SamplingParams(temperature=t), (1,), 1, vast) for t in (0.0, 1e-4, 1.0, 100.0)]
    assert sampler(*batch_of(cases)).token_ids.tolist() == [4, 4, 4, 4]


def test_top_k_larger_than_the_vocabulary_is_off(sampler: Sampler) -> None:
    cases = [Case(SamplingParams(), (1,), 1, logits_of(n), seed=n) for n in range(50)]
    large = [Case(SamplingParams(top_k=10_000), (1,), 1, logits_of(n), seed=n) for n in range(50)]
    assert sampler(*batch_of(cases)).token_ids.tolist() == sampler(*batch_of(large)).token_ids.tolist()


def test_seeds_samples_and_positions_decide_the_draw(sampler: Sampler) -> None:
    flat = np.zeros(1000, np.float32)

    def chosen(seed: int = 1, sample_index: int = 0, length: int = 3) -> int:
        case = Case(SamplingParams(), (1,) * length, 1, flat, seed, sample_index)
        return int(sampler(*batch_of([case])).token_ids[0])

    assert chosen() == chosen()
    assert len({chosen(), chosen(seed=2), chosen(sample_index=1), chosen(length=4)}) == 4


def test_an_all_greedy_batch_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sorted, exponentiated or copied when no row asks for it."""
    sampler = Sampler("cpu")
    monkeypatch.setattr(sampler, "_draw", None)
    for name in ("sort", "topk", "softmax", "log_softmax", "exp", "clone", "index_select"):
        monkeypatch.setattr(torch.Tensor, name, None)
    cases = [Case(SamplingParams(temperature=0), (1,), 1, logits_of(n)) for n in range(5)]
    got = sampler(*batch_of(cases)).token_ids.tolist()
    assert got == [int(case.logits.argmax()) for case in cases]


def test_unknown_token_ids_which_admission_refuses_are_harmless(sampler: Sampler) -> None:
    for values in (
        {"logit_bias": {VOCAB: 1.0}},
        {"allowed_token_ids": (0, -1)},
        {"bad_words_token_ids": ((1, VOCAB),)},
        {"stop_token_ids": (VOCAB + 5,)},
    ):
        sampling = SamplingParams(temperature=0, **values)
        assert sampler(*batch_of([Case(sampling, (1,), 1, logits_of(1))])).finite.all()
