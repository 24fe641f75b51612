"""A simulated device: real scheduling and memory, time from a cost model, tokens by a rule."""

import json

import pytest

from quire import LLM, SamplingParams
from quire.bench.drive import Bench
from quire.bench.workload import Lengths
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, WeightsError
from quire.core.request import Request
from quire.core.structured import StructuredOutput
from quire.engine.build import build
from quire_lab.simulate.clock import VirtualClock
from quire_lab.simulate.cost_model import CostModel, Factors, ModelNumbers, Rates, StepCounts
from quire_lab.simulate.devices import device_names, find_device

DEVICE = "simulated:a100-40g"


def built(**settings):
    given = {"model": "opt-13b", "device": DEVICE, "num_blocks": 200, "enable_prefix_caching": False}
    return build(EngineConfig.of(**{**given, **settings}))


def run(engine, prompts, sampling):
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), prompt, sampling))
    tokens = {}
    while engine.has_work:
        for update in engine.step():
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    engine.check_integrity()
    return tokens


PROMPTS = [list(range(5, 5 + length)) for length in (40, 90, 7, 64)]
LONG = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)


def test_the_same_requests_give_the_same_tokens_and_the_same_times():
    first, second = built(), built()
    assert run(first.engine, PROMPTS, LONG) == run(second.engine, PROMPTS, LONG)
    assert first.engine.clock() == second.engine.clock() > 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 12, "preemption_mode": "recompute"},
        {"num_blocks": 12, "preemption_mode": "swap"},
        {"steps_in_flight": 0},
        {"max_num_batched_tokens": 16},
    ],
)
def test_tokens_do_not_depend_on_preemption_steps_in_flight_or_chunks(changes):
    changed = built(**{"max_num_seqs": 8, **changes})
    assert run(changed.engine, PROMPTS, LONG) == run(built().engine, PROMPTS, LONG)


def test_no_time_passes_but_the_steps_own():
    engine = built(steps_in_flight=1).engine
    run(engine, PROMPTS, LONG)
    assert engine.clock() == pytest.approx(engine.stats.step_seconds)


def test_a_step_in_flight_waits_for_the_one_before_it():
    overlapped, alone = built(steps_in_flight=1).engine, built(steps_in_flight=0).engine
    run(overlapped, PROMPTS[:1], LONG)
    run(alone, PROMPTS[:1], LONG)
    assert overlapped.clock() == pytest.approx(alone.clock())  # a device does one step at a time


def test_the_bench_reads_the_virtual_clock():
    bench = Bench(built())
    watched = bench.serve(bench.requests([Lengths(32, 20)] * 3))
    assert watched.seconds == pytest.approx(bench.engine.clock())
    assert all(0 < one.first_token < one.last_token <= watched.seconds for one in watched.requests)
    # 20 passes over 26 GB at 1.555 TB/s cannot take less
    assert watched.seconds > 20 * 25.7e9 / 1.555e12


def test_samples_and_beams_run_and_leave_nothing_behind():
    sampled = run(built().engine, PROMPTS, SamplingParams(n=3, max_tokens=20, ignore_eos=True))
    beams = run(
        built().engine, PROMPTS, SamplingParams(n=4, use_beam_search=True, max_tokens=20, ignore_eos=True)
    )
    assert len(sampled) == 3 * len(PROMPTS)
    assert len(beams) == 4 * len(PROMPTS)
    assert sampled["0", 0] != sampled["0", 1]


def test_llm_takes_the_name_of_an_architecture():
    with LLM("opt-125m", device="simulated:v100", use_tqdm=False) as llm:
        found = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, logprobs=1), use_tqdm=False)[0]
        assert len(found.outputs[0].token_ids) == 4
        assert found.metrics.total == pytest.approx(llm.engine.clock())
        assert any("simulated (derived from h200" in line for line in llm.report.lines())


def test_a_grammar_is_obeyed(tmp_path):
    llm = LLM(device="simulated", use_tqdm=False)  # the built-in model: a grammar needs a vocabulary
    sampling = SamplingParams(max_tokens=8, structured={"choice": ["yes", "no"]})
    with llm:
        assert llm.generate("Is it so?", sampling, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


def test_beams_obey_a_grammar_too():
    engine = build(EngineConfig.of(model=None, device="simulated:h200")).engine
    form = StructuredOutput.regex("[ab]{2,5}")
    engine.add(
        Request("b", [5, 6, 7], SamplingParams(n=2, use_beam_search=True, max_tokens=8, structured=form))
    )
    ended = []
    while engine.has_work:
        ended += [(one.finish_reason, one.error) for one in engine.step() if one.finish_reason is not None]
    assert len(ended) == 2
    assert all(error is None for _, error in ended)


def test_several_ranks_hold_more_and_step_faster():
    one = build(EngineConfig.of(model="opt-13b", device="simulated:a100-40g"))
    four = build(EngineConfig.of(model="opt-13b", device="simulated:4xa100-40g"))
    assert four.report.pool.num_tokens > 4 * one.report.pool.num_tokens
    for engine in (one.engine, four.engine):
        run(engine, PROMPTS, LONG)
    assert one.engine.clock() / 4 < four.engine.clock() < one.engine.clock()  # all-reduces cost something


@pytest.mark.parametrize("name", device_names())
def test_every_device_says_what_it_was_fitted_on(name):
    device = find_device(f"simulated:{name}")
    assert device.fit["on"] != "nothing"
    assert device.fit["held_out_median_error"] < 0.5
    assert (device.derived_from is None) == ("factors" in json.loads(_file(name).read_text()))


def _file(name):
    from quire_lab.simulate import devices

    return devices._FOLDER / f"{name}.json"


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"device": "simulated:a101"}, ConfigError, "a100-40g"),
        ({"device": "simulated:0xa100-40g"}, ConfigError, "1 to 64"),
        ({"device": "simulated:2xcpu", "model": "opt-125m"}, ConfigError, "no link"),
        ({"device": "simulated:no-such.json"}, ConfigError, "quire bench fit"),
        ({"model": "opt-66b"}, ConfigError, "simulated:2xa100-40g"),
        ({"model": "./opt-14b"}, WeightsError, "no such folder"),
        ({"model": "opt-14b.gguf"}, WeightsError, "opt-13b"),
        ({"speculative_config": '{"method": "ngram"}'}, ConfigError, "speculation"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_a_remedy(settings, error, words):
    with pytest.raises(error, match=words):
        built(**{"num_blocks": None, **settings})


def test_dense_layers_cost_the_slower_of_reading_and_multiplying():
    model = ModelNumbers(1, 8, 16, 8, 1000, 500, 0, 4, 64, 2)
    cost = CostModel(
        Rates(bandwidth=1000.0, flops=1000.0), Factors(kv=0, attention=0, activations=0, logits=0), model
    )
    assert cost.seconds(StepCounts(1, 1, 0, 1, 1.0)) == pytest.approx(1.0)  # 1000 bytes
    assert cost.seconds(StepCounts(1, 4, 0, 4, 4.0)) == pytest.approx(4.0)  # 2 × 500 × 4 operations


def test_a_slow_link_makes_swapping_wait():
    def seconds(host_link):
        model = ModelNumbers(1, 8, 16, 8, 1000, 500, 0, 4, 64, 2)
        cost = CostModel(Rates(1000.0, 1000.0, host_link=host_link), Factors(), model)
        return cost.seconds(StepCounts(1, 1, 0, 1, 1.0, num_moves=10))

    assert seconds(1.0) == pytest.approx(640.0)
    assert seconds(1e6) == seconds(1e9)  # hidden behind the pass


def test_a_virtual_clock_never_goes_back():
    clock = VirtualClock()
    clock.advance_to(2.0)
    clock.advance_to(1.0)
    assert clock() == 2.0


def test_prompts_of_an_encoder_decoder_model_are_charged_for_the_encoder():
    settings = {"model": "flan-t5-xl", "device": "simulated:h200", "enable_prefix_caching": False}
    engine = build(EngineConfig.of(**settings)).engine
    times = []
    for count in (1, 2):
        started = engine.clock()
        engine.add(Request("one", list(range(5, 517)), SamplingParams(max_tokens=count, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        times.append(engine.clock() - started)
        engine.check_integrity()
    # 2.72 GB of encoder and 2.85 GB of decoder for the first token, the decoder's alone for the second
    assert times[0] > 1.5 * (times[1] - times[0])
    layout = engine.memory.block_size
    assert engine.limits.encoder.max_tokens == (2048 - 2) // layout * layout
    with pytest.raises(ConfigError, match="no costs for adapters of T5ForConditionalGeneration"):
        build(EngineConfig.of(**settings, enable_lora=True))
