"""When drafts are waited for: a model always has one."""

import pytest

from quire.core.config import SpeculativeConfig
from quire.core.request import Request, Sequence, ints
from quire.core.sampling import SamplingParams
from quire.engine.speculation import Speculation
from quire.engine.structured import StructuredOutputs
from quire.engine.validation import Limits
from tests.engine.random_proposer import RandomProposer


def sequence(index: int, tokens: list[int]) -> Sequence:
    return Sequence(Request(f"r{index}", tuple(tokens), SamplingParams(), 0, max_len=1000), 0, ints(tokens))


def speculation(proposer) -> Speculation:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    return Speculation(config, proposer, 64, StructuredOutputs(None, Limits(100, 1000, 64, ())))


@pytest.mark.parametrize("num_running", [1, 4, 16])
def test_a_model_s_drafts_are_waited_for_where_tokens_are_cheap(num_running: int) -> None:
    drafting = speculation(RandomProposer(acceptance_rate=0.7))
    for num_tokens in (1, 4, 16, 96) * 2:
        drafting._costs.note(num_tokens, 1.0)
    running = [sequence(i, list(range(9, 14 + i))) for i in range(num_running)]
    assert drafting.pays(running)  # nothing is known of them, but that a model has a draft for each
