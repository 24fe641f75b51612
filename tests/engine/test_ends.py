"""What ends a request ends that request alone, and leaves nothing of it behind."""

import pytest

from quire.core.config import SchedulerConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.step import PromptLogprobs, Step, StepResult, TokenLogprobs
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from tests.engine.page_runner import END, VOCABULARY, PageRunner

PROMPT = [5, 6, 7, 8, 9]


class ScoringRunner(PageRunner):
    """Returns logprobs of the prompt tokens that a step computes, as a runner does."""

    def run(self, step: Step) -> StepResult:
        result = super().run(step)
        pieces = tuple(
            PromptLogprobs(row, first + 1, (TokenLogprobs(1, -1.0, 1, (), ()),) * (count - 1))
            for row, first, count in zip(step.rows, step.num_computed, step.num_tokens, strict=True)
            if count > 1
        )
        return StepResult(result.step_id, result.token_ids, prompt_logprobs=pieces)


def engine_of(runner: PageRunner, in_flight: int = 0) -> Engine:
    config = SchedulerConfig(4, 64, steps_in_flight=in_flight)
    return Engine(config, Limits(VOCABULARY, 64, 4, (END,)), PagedMemory(60, 4, "test"), runner)


def finish(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for update in engine.step():
            found.setdefault(update.request_id, []).extend(update.token_ids)
    return found


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_string_leaves_no_prompt_logprobs_and_counts_as_an_end(in_flight: int, n: int) -> None:
    engine = engine_of(ScoringRunner(60, 4), in_flight)
    engine.add(Request("a", PROMPT, SamplingParams(max_tokens=20, n=n, prompt_logprobs=1, ignore_eos=True)))
    updates = []
    while not updates:
        updates = engine.step()
    assert len(updates[0].prompt_logprobs) == len(PROMPT) - 1
    for index in range(n):
        assert engine._committer._prompt_logprobs  # until the last sequence has ended
        assert engine.stop("a", index)
    assert not engine._committer._prompt_logprobs
    assert not engine.stop("a", 0)
    finish(engine)
    assert not engine._committer._prompt_logprobs
    assert engine.stats.num_finished == n
