"""When drafts are waited for: a model always has one, and is used where it pays."""

import random
from dataclasses import replace
from functools import partial

import pytest

from quire.core.config import SchedulerConfig, SpeculativeConfig
from quire.core.request import Request, Sequence, ints
from quire.core.sampling import SamplingParams
from quire.core.step import StepResult
from quire.engine.draft_model import DraftModel
from quire.engine.engine import Engine
from quire.engine.speculation import Speculation
from quire.engine.structured import StructuredOutputs
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from tests.engine.page_runner import VOCABULARY, PageRunner
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


class Machine:
    """Time as steps take it: the first step of a size is recorded and slow, others are noisy, some are disturbed."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self._random = random.Random(seed)

    def spend(self, seconds: float, is_first: bool) -> float:
        noise = self._random.gauss(1.0, 0.08) * (4.0 if self._random.random() < 0.03 else 1.0)
        taken = seconds * max(0.5, noise) * (self._random.uniform(2.0, 10.0) if is_first else 1.0)
        self.now += taken
        return taken


class TimedRunner(PageRunner):
    """`agreement`: how often a token is the one that the target would have chosen."""

    def __init__(self, machine: Machine, fixed: float, each: float, agreement: float = 1.0) -> None:
        super().__init__(300, 16)
        self._machine, self._fixed, self._each = machine, fixed, each
        self._agreement, self._random = agreement, random.Random(1)
        self._sizes: set[int] = set()

    def collect(self) -> StepResult:
        step = self.launched[0][0]
        result, size = super().collect(), sum(step.num_tokens)
        taken = self._machine.spend(self._fixed + self._each * size, size not in self._sizes)
        self._sizes.add(size)
        tokens = ints(
            token if self._random.random() < self._agreement else (token + 1) % VOCABULARY
            for token in result.token_ids
        )
        if self._agreement < 1.0:  # its rows go on with its own tokens
            for row, token in zip(step.sample_rows, tokens, strict=True):
                self.tokens[row][-1] = token
        return replace(result, token_ids=tokens, seconds=taken)


def speedup(seed: int, agreement: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of 450 tokens in three requests, one after the other, over the same without drafts."""
    seconds = {}
    for drafts in (False, True):
        machine = Machine(seed)
        monkeypatch.setattr("quire.engine.draft_model.time.perf_counter", lambda machine=machine: machine.now)
        draft_model = DraftModel(TimedRunner(machine, 0.25, 0.01, agreement), 64)
        config = SpeculativeConfig("ngram", 4)
        engine = Engine(
            SchedulerConfig(2, 64, steps_in_flight=0),
            Limits(VOCABULARY, 1000, 2, ()),
            PagedMemory(300, 16, "test"),
            TimedRunner(machine, 1.0, 0.03),
            make_speculation=partial(Speculation, config, draft_model, 2) if drafts else None,
        )
        for number in range(3):
            sampling = SamplingParams(max_tokens=150, ignore_eos=True)
            engine.add(Request(str(number), [number, 2, 3], sampling))
            while engine.has_work:
                engine.step()
        seconds[drafts] = machine.now
    return seconds[False] / seconds[True]


@pytest.mark.parametrize("seed", range(10))
def test_a_draft_model_that_is_nearly_always_right_is_used_after_every_start(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first measurements were: of recorded passes, and on a noisy machine."""
    assert speedup(seed, 0.93, monkeypatch) > 1.25


def test_a_draft_model_that_is_seldom_right_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = [speedup(seed, 0.1, monkeypatch) for seed in range(10)]
    assert sorted(ratios)[5] > 0.85  # with all that is recorded once
