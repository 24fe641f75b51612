"""AsyncLLM: many callers, one engine thread."""

import asyncio
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
        return [r.outputs[0].text async for r in engine.generate("Once upon a time", GREEDY)]

    texts = asyncio.run(collect())
    assert len(texts) > 4
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
        stream = engine.generate("Once upon a time", GREEDY.changed(max_tokens=400))
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
        async for result in engine.generate("Once", GREEDY.changed(max_tokens=400), request_id="mine"):
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
        stream = closing.generate("Once upon a time", GREEDY.changed(max_tokens=400))
        await anext(stream)
        await asyncio.get_running_loop().run_in_executor(None, closing.close)
        with pytest.raises(EngineDead, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead, match="closed"):
            await last(closing, "Hello")

    asyncio.run(close())


def test_an_id_that_is_being_served_is_refused(engine):
    async def twice():
        stream = engine.generate("Once", GREEDY.changed(max_tokens=400), request_id="same")
        await anext(stream)
        with pytest.raises(InvalidRequest, match="already being served"):
            await last(engine, "Hello", request_id="same")
        await stream.aclose()

    asyncio.run(twice())
