"""What ends a request ends that request alone, and leaves nothing of it behind."""

import pytest

from quire.core.config import SchedulerConfig
from quire.core.errors import InvalidRequest
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.step import Step
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from tests.engine.page_runner import END, VOCABULARY, PageRunner, expected

PROMPT = [5, 6, 7, 8, 9]


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
    engine = engine_of(PageRunner(60, 4), in_flight)
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


HALF = "a\ud800"


@pytest.mark.parametrize(
    ("values", "sampling", "param"),
    [
        ({"cache_salt": HALF}, {}, "cache_salt"),
        ({"tenant": HALF}, {}, "tenant"),
        ({"request_id": HALF}, {}, "request_id"),
        ({"adapter": HALF}, {}, "adapter"),
        ({}, {"max_tokens": None, "min_tokens": 2**40}, "min_tokens"),
        ({}, {"max_tokens": None, "min_tokens": 64}, "min_tokens"),
    ],
    ids=str,
)
def test_a_value_that_no_step_could_take_is_refused_on_arrival(values, sampling, param) -> None:
    engine = engine_of(PageRunner(60, 4))
    engine.add(Request("other", PROMPT, SamplingParams(max_tokens=8)))
    engine.step()
    fields = {
        "request_id": "bad",
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(**sampling),
        **values,
    }
    with pytest.raises(InvalidRequest) as caught:
        engine.add(Request(**fields))
    assert caught.value.param == param
    assert finish(engine) == {"other": expected(PROMPT, 0, 8)[1:]}
    engine.check_integrity()


def test_a_value_that_only_the_sampler_finds_wrong_is_refused_on_arrival() -> None:
    """Whatever checks forget: the values of a request are tried before a step depends on them."""
    engine = engine_of(PageRunner(60, 4))
    sampling = SamplingParams(max_tokens=8)
    object.__setattr__(sampling, "logprobs", 2**63)
    with pytest.raises(InvalidRequest, match="cannot be computed: OverflowError"):
        engine.add(Request("bad", PROMPT, sampling))
    assert not engine.has_work


class LosingRunner(PageRunner):
    """Runs one step that the engine has not recorded, as after an interrupt between launch and record."""

    def launch(self, step: Step) -> None:
        super().launch(step)
        if step.step_id == 2:
            raise KeyboardInterrupt


def test_a_step_that_was_lost_is_an_error_and_not_the_tokens_of_another() -> None:
    engine = engine_of(LosingRunner(60, 4))
    engine.add(Request("a", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)))
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    engine.abort("a")
    engine.add(Request("b", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)))
    with pytest.raises(RuntimeError, match="returned step 2 where step 3 was due"):
        finish(engine)
