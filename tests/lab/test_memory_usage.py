"""How the pool is spent under paging and reservation, and who waits for what."""

import random

import pytest

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.policies import make_memory
from quire.engine.validation import Limits
from quire_lab.baselines.memory_usage import MemoryUsageSampler
from quire_lab.simulate.clock import VirtualClock
from tests.engine.page_runner import END, VOCABULARY, PageRunner

POOL = 512  # tokens


def run(reservation, block_size=1, num_requests=40, batching="continuous", **sampling):
    """A pool much smaller than the demand, answers as long as asked; the sampler, and how many ran on average."""
    options = MemoryConfig(block_size=block_size, reservation=reservation, enable_prefix_caching=False)
    memory = make_memory(options, POOL // block_size, 128)
    config = SchedulerConfig(64, 256, steps_in_flight=1, batching=batching)
    runner = PageRunner(memory.num_blocks, block_size)
    engine = Engine(config, Limits(VOCABULARY, 128, 64, (END,)), memory, runner, clock=VirtualClock())
    draw = random.Random(3)
    for name in range(num_requests):
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(2, 12))]
        engine.add(
            Request(
                str(name),
                prompt,
                SamplingParams(max_tokens=draw.randint(3, 40), ignore_eos=True, **sampling),
            )
        )
    sampler, num_running = MemoryUsageSampler(memory), []
    for step in range(3000):
        if not engine.has_work:
            break
        engine.step()
        scheduler = engine.scheduler
        first = scheduler.waiting.peek()
        sampler.sample(
            float(step), scheduler.running, scheduler.policy.kept, first.request if first else None
        )
        num_running.append(len(scheduler.running))
        paged_slack = sampler.samples()[-1].spending.internal if reservation == "paged" else 0
        assert paged_slack < block_size * max(1, len(scheduler.running))
    assert not engine.has_work
    if reservation != "paged":
        assert scheduler.stats.num_preemptions == 0
    busy = [count for count in num_running if count]
    return sampler, sum(busy) / len(busy)


def test_fewer_requests_run_the_more_is_reserved():
    averages = [run(kind)[1] for kind in ("max", "pow2", "oracle", "paged")]
    assert averages == sorted(averages)
    assert averages[0] < averages[1]


@pytest.mark.parametrize("kind", ["max", "pow2", "oracle", "paged"])
def test_every_position_is_counted_once(kind):
    sampler, _ = run(kind, num_requests=20)
    assert {sample.spending.total for sample in sampler.samples()} == {POOL}
    assert sum(sampler.mean_shares().values()) == pytest.approx(1.0)


def test_what_is_lost_where():
    shares = {kind: run(kind)[0].mean_shares() for kind in ("max", "pow2", "oracle")}
    paged = run("paged", block_size=4)[0].mean_shares()
    assert paged["external"] == 0.0
    assert paged["reserved"] == 0.0
    assert paged["internal"] > 0.0
    assert shares["max"]["internal"] > 0.4
    assert shares["max"]["tokens"] < shares["pow2"]["tokens"] < shares["oracle"]["tokens"] < paged["tokens"]
    assert shares["oracle"]["internal"] == 0.0  # it knew
    assert shares["oracle"]["reserved"] > 0.0
    assert shares["oracle"]["external"] > 0.0


def test_a_static_batch_holds_memory_for_nobody():
    assert run("paged", block_size=4, batching="static")[0].mean_shares()["ended"] > 0.1
    assert run("max", batching="static")[0].mean_shares()["ended"] > 0.1


def test_samples_of_one_request_have_runs_of_their_own():
    shared = run("paged", num_requests=12, n=3)[0].mean_shares()
    sampler, _ = run("oracle", num_requests=12, n=3)
    assert {sample.spending.total for sample in sampler.samples()} == {POOL}
    assert shared["external"] == 0.0
