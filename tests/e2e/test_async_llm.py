"""AsyncLLM: many callers, one engine thread."""

import asyncio
import time
from contextlib import aclosing
from itertools import pairwise

import pytest

from quire import AsyncLLM, SamplingParams
from quire.core.errors import EngineDead, InvalidRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    llm = AsyncLLM(max_num_seqs=16, kv_cache_memory_bytes=256 << 20)
    yield llm
    llm.close()


async def last(llm, prompt, sampling=GREEDY, request_id=None):
    return [result async for result in llm.generate(prompt, sampling, request_id)][-1]


def test_concurrent_callers_get_what_they_would_get_alone(engine, llm):
    prompts = [f"Tell me about the number {i}." for i in range(24)]

    async def everyone():
        return await asyncio.gather(*(last(engine, p) for p in prompts))

    together = asyncio.run(everyone())
    alone = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [r.outputs[0].text for r in together] == [r.outputs[0].text for r in alone]


def test_text_grows_while_it_is_generated(engine):
    async def collect():
        texts = []
        async with aclosing(engine.generate("Once upon a time", GREEDY.changed(max_tokens=2000))) as stream:
            async for result in stream:
                texts.append(result.outputs[0].text)
                if len(texts) > 8:
                    break
        return texts

    texts = asyncio.run(collect())
    assert len(texts) > 8
    assert all(b.startswith(a) for a, b in pairwise(texts))


def test_a_refused_request_fails_alone(engine):
    async def mixed():
        bad = last(engine, {"prompt_token_ids": [10**6]})
        return await asyncio.gather(last(engine, "Hello"), bad, return_exceptions=True)

    good, bad = asyncio.run(mixed())
    assert good.finished
    assert isinstance(bad, InvalidRequest)


def test_leaving_the_iterator_frees_the_request(engine):
    async def leave():
        stream = engine.generate("Once upon a time", GREEDY.changed(max_tokens=2000))
        async for _ in stream:
            break
        await stream.aclose()
        await last(engine, "Hello", GREEDY.changed(max_tokens=1))
        for _ in range(600):
            if not engine._built.engine.has_work:
                return True
            await asyncio.sleep(0.05)
        return False

    assert asyncio.run(leave())


def test_an_aborted_request_ends_with_that_reason(engine):
    async def abort():
        results = []
        async for result in engine.generate("Once", GREEDY.changed(max_tokens=2000), request_id="mine"):
            engine.abort("mine")
            results.append(result)
        return results

    assert asyncio.run(abort())[-1].outputs[0].finish_reason == "abort"


def test_a_fault_in_the_engine_reaches_every_caller():
    async def fault():
        async with AsyncLLM(max_num_seqs=4, num_blocks=64) as broken:
            broken._built.engine._runner.collect = lambda: 1 / 0
            with pytest.raises(EngineDead, match="division by zero"):
                await last(broken, "Hello")
            with pytest.raises(EngineDead):
                await last(broken, "Hello again")

    asyncio.run(fault())


def test_a_closed_engine_refuses_and_ends_what_is_open():
    async def close():
        closing = AsyncLLM(max_num_seqs=4, num_blocks=64)
        stream = closing.generate("Once upon a time", GREEDY.changed(max_tokens=1000))
        await anext(stream)
        await asyncio.get_running_loop().run_in_executor(None, closing.close)
        with pytest.raises(EngineDead, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead, match="closed"):
            await last(closing, "Hello")

    asyncio.run(close())


def test_an_id_that_is_being_served_is_refused_and_its_request_goes_on(engine):
    async def twice():
        stream = engine.generate("Once", GREEDY, request_id="same")
        await anext(stream)
        with pytest.raises(InvalidRequest, match="already being served"):
            await last(engine, "Hello", request_id="same")
        results = [result async for result in stream]
        again = await last(engine, "Hello", request_id="same")
        return results[-1], again

    first, again = asyncio.run(asyncio.wait_for(twice(), 60))
    assert len(first.outputs[0].token_ids) == 24
    assert again.finished


def test_an_id_is_free_as_soon_as_its_request_is_aborted(engine):
    async def reuse():
        stream = engine.generate("Once", GREEDY.changed(max_tokens=2000), request_id="again")
        await anext(stream)
        engine.abort("again")
        second = asyncio.create_task(last(engine, "Hello", request_id="again"))
        await asyncio.sleep(0)  # the second is submitted before the first's consumer hears of the abort
        first = [result async for result in stream]
        return first[-1], await second

    first, second = asyncio.run(asyncio.wait_for(reuse(), 60))
    assert first.outputs[0].finish_reason == "abort"
    assert second.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "values", "param"),
    [
        ("Hello", {"max_tokens": None, "min_tokens": 2**40}, "min_tokens"),
        ({"prompt": "x " * 200, "cache_salt": "\ud800"}, {"max_tokens": 2}, "cache_salt"),
    ],
)
def test_a_value_that_no_step_could_take_ends_its_own_request(engine, prompt, values, param):
    async def mixed():
        bad = last(engine, prompt, SamplingParams(**values))
        return await asyncio.gather(last(engine, "Hello"), bad, return_exceptions=True)

    good, bad = asyncio.run(asyncio.wait_for(mixed(), 60))
    assert good.finished
    assert isinstance(bad, InvalidRequest)
    assert bad.param == param


def test_a_request_that_arrives_while_the_engine_dies_fails():
    """The step that fails lasts half a second: one request is known to the engine, one is in its inbox, one is late."""

    async def die():
        async with AsyncLLM(max_num_seqs=4, num_blocks=64) as dying:

            def step():
                time.sleep(0.5)
                raise MemoryError("a step that fails")

            dying._built.engine.step = step

            async def later(seconds):
                await asyncio.sleep(seconds)
                return await last(dying, "Once")

            return await asyncio.gather(*(later(s) for s in (0.0, 0.2, 0.8)), return_exceptions=True)

    faults = asyncio.run(asyncio.wait_for(die(), 60))
    assert [type(fault) for fault in faults] == [EngineDead] * 3
