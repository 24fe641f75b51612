"""The kernel that samples a whole step on the device: the CPU sampler's tokens, from the same random numbers."""

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from quire.core.request import ints
from quire.core.sampling import SamplingParams
from quire.core.step import BeamSet
from quire.kernels import registry
from quire.sampling.beams import candidate_records
from quire.sampling.columns import DeviceColumns, Purpose, RowFlag, SamplingColumns, stream_key, uniforms
from quire.sampling.penalties import Penalties
from quire.sampling.records import SampleRequests
from quire.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(
    "triton" not in registry.alternatives("sample"), reason="triton cannot run here"
)

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=1.0, top_k=100, top_p=0.6),  # more than the list holds
    SamplingParams(temperature=0.7, min_p=0.1, top_k=9),
    SamplingParams(temperature=2.0, top_k=3, top_p=0.9),
)


@pytest.fixture
def kernel() -> ModuleType:
    return registry.load("sample", "triton")


def requests_of(params: list[SamplingParams], vocabulary: int, rows: list[int]) -> SampleRequests:
    columns = SamplingColumns(max(rows) + 1, vocabulary)
    for row, sampling in zip(rows, params, strict=True):
        columns.start_row(row, sampling, seed=row * 31 + 5, sample_index=row % 3, num_prompt_tokens=2)
    token_ids = torch.full((max(rows) + 1, 40), -7, dtype=torch.int32)
    token_ids[:, :8] = torch.randint(vocabulary, (max(rows) + 1, 8), dtype=torch.int32)
    return SampleRequests(np.array(rows), np.array([4 + row % 4 for row in rows]), columns, token_ids)


def sampler_with(kernel: ModuleType) -> Sampler:
    made = Sampler("cpu")
    made._kernel, made._samples_rows = kernel, True
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.3, 6.0])
def test_the_same_numbers_give_the_cpu_samplers_tokens(
    kernel: ModuleType, spread: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(int(spread * 10))
    rows = [7, 0, 3, 11, 4, 9]
    requests = requests_of(list(KINDS), 700, rows)
    logits = (torch.randn(6, 700) * spread).to(dtype)
    expected = Sampler("cpu")(logits.float(), requests)
    sampled = sampler_with(kernel)(logits, requests)
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    assert sampled.finite.all()
    assert requests.token_ids[rows, requests.positions].tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beams_are_compared_in_full_precision(kernel: ModuleType, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    beam = SamplingParams(use_beam_search=True, n=2, logit_bias={9: 1.5})
    rows = [2, 5, 0, 7]
    requests = replace(
        requests_of([beam, SamplingParams(temperature=0.9), beam, beam], 704, rows),
        beams=(BeamSet(ints([0, 2]), (-101.5, -101.25), 4), BeamSet(ints([3]), (0.0,), 4)),
    )
    logits = torch.randn(4, 704).to(dtype)
    expected = Sampler("cpu")(logits.float().clone(), requests)
    sampled = sampler_with(kernel)(logits, requests)
    assert candidate_records(sampled.beams) == candidate_records(expected.beams)
    assert sampled.token_ids[1] == expected.token_ids[1]


def test_edited_rows_go_through_the_same_stages(kernel: ModuleType) -> None:
    torch.manual_seed(4)
    params = [
        SamplingParams(temperature=0.9, frequency_penalty=0.7, repetition_penalty=1.4, logprobs=3),
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        SamplingParams(temperature=1.0, allowed_token_ids=(3, 8, 13), top_p=0.8),
        SamplingParams(temperature=0.0, logprobs=2),
    ]
    requests = requests_of(params, 300, [1, 2, 0, 5])
    logits = torch.randn(4, 300) * 3
    expected = Sampler("cpu")(logits.clone(), requests)
    sampled = sampler_with(kernel)(logits.clone(), requests)
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    torch.testing.assert_close(sampled.logprobs.logprobs, expected.logprobs.logprobs)
    assert torch.equal(sampled.logprobs.top_ids, expected.logprobs.top_ids)


@pytest.mark.parametrize("sampling", [KINDS[0], KINDS[1], KINDS[4]])
def test_rows_that_cannot_be_sampled_are_marked_and_padding_is_left_alone(
    kernel: ModuleType, sampling: SamplingParams
) -> None:
    columns = SamplingColumns(5, 600)
    for row in range(5):
        columns.start_row(row, sampling, row, 0, 1)
    device_columns = DeviceColumns(columns, "cpu")
    device_columns.update(np.arange(5))
    logits = torch.randn(5, 600)
    logits[0, 555], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :590] = -torch.inf  # the sample sees none of the others
    token_ids = torch.full((5, 9), -7, dtype=torch.int32)
    tokens, finite = torch.full((5,), -7), torch.full((5,), -7, dtype=torch.int8)
    rows = torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32)
    kernel.sample_rows(logits, rows, torch.full((5,), 8), device_columns, token_ids, tokens, finite)
    assert finite.tolist() == [0, 0, 0, 1, -7]
    assert tokens[:3].tolist() == [0, 0, 0]
    assert 590 <= int(tokens[3]) < 600
    assert int(tokens[4]) == -7
    assert token_ids[:, 8].tolist() == [*tokens[:4].tolist(), -7]


def test_crowds_of_equal_logits_are_kept_lowest_id_first(kernel: ModuleType) -> None:
    """Far more equals than the list holds: 260 tokens of one weight, half of which top-k or top-p keep."""
    logits = torch.full((4, 320), -torch.inf)
    logits[:, 40:300] = 1.25
    numbers = torch.tensor([0.0, 0.999, 0.0, 0.999], dtype=torch.float64)
    top_k = torch.tensor([130, 130, 0, 0], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.5])
    drawn = kernel.sample_filtered(logits, torch.ones(4), top_k, top_p, torch.zeros(4), numbers)
    assert drawn.tolist() == [40, 169, 40, 169]


def test_top_p_after_top_k_looks_above_the_tokens_that_top_k_was_decided_by(kernel: ModuleType) -> None:
    torch.manual_seed(4)
    logits = (torch.randn(24, 2000) * 2.0)[[14, 17, 22]]
    logits[:, ::3] = -torch.inf
    numbers = torch.tensor([0.6544463551195436, 0.44364033531915625, 0.6314115048835492], dtype=torch.float64)
    inputs = (
        torch.ones(3),
        torch.full((3,), 40, dtype=torch.int32),
        torch.full((3,), 0.9),
        torch.full((3,), 0.01),
    )
    expected = registry.load("sample", "reference").sample_filtered(
        logits.bfloat16().float(), *inputs, numbers
    )
    assert kernel.sample_filtered(logits.bfloat16(), *inputs, numbers).tolist() == expected.tolist()


def test_random_numbers_on_the_device_are_the_hosts_to_the_last_bit(kernel: ModuleType) -> None:
    """All weights equal: the token is the number's place among V, so its leading bits show."""
    rows, vocabulary = 6, 500
    columns = SamplingColumns(rows, vocabulary)
    for row in range(rows):
        columns.start_row(
            row, SamplingParams(temperature=1.0), seed=2**63 + row, sample_index=row, num_prompt_tokens=1
        )
    assert columns.token_key[1] == stream_key(2**63 + 1, 1, Purpose.TOKEN)
    device_columns = DeviceColumns(columns, "cpu")
    device_columns.update(np.array([5, 1]))
    device_columns.update(np.array([0, 2, 3, 4]))
    positions = np.arange(rows) * 1000
    tokens, finite = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool)
    kernel.sample_rows(
        torch.zeros(rows, vocabulary),
        torch.arange(rows),
        torch.from_numpy(positions),
        device_columns,
        torch.zeros(rows, 6000, dtype=torch.int32),
        tokens,
        finite,
    )
    expected = np.floor(uniforms(columns.token_key, positions) * vocabulary)
    assert tokens.tolist() == expected.astype(int).tolist()


@pytest.mark.parametrize("length", [8, 1500])  # one chunk of a history, and several
def test_penalties_are_the_cpus_bit_for_bit(kernel: ModuleType, length: int) -> None:
    """More rows than strips of tallies, few different tokens, rows without penalties between, prompts of any length."""
    torch.manual_seed(length)
    kinds = [
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, frequency_penalty=0.3, presence_penalty=-0.4),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=0.7, frequency_penalty=0.1, presence_penalty=0.2),
        SamplingParams(temperature=0.0, presence_penalty=1.5),
    ]
    count, vocabulary = 40, 61
    columns = SamplingColumns(count, vocabulary)
    for row in range(count):
        columns.start_row(row, kinds[row % 5], 1, 0, num_prompt_tokens=(row * length) // count)
    token_ids = torch.randint(vocabulary, (count, length), dtype=torch.int32)
    positions = np.array([length - row % 7 for row in range(count)])
    requests = SampleRequests(np.arange(count)[::-1].copy(), positions, columns, token_ids)
    logits = torch.randn(count, vocabulary) * 3
    logits[::7, 5] = -torch.inf
    penalised = np.flatnonzero(columns.flags[requests.rows] & RowFlag.PENALISED)
    expected, found = logits.clone(), logits.clone()
    Penalties().apply(expected, penalised, requests)
    mine = Penalties(kernel)
    for _ in range(2):  # the second time on what the first left behind
        found = logits.clone()
        mine.apply(found, penalised, requests)
        assert torch.equal(found, expected)
    assert not mine._counts.any()
