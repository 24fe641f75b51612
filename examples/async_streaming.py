"""Stream two answers at once: AsyncLLM runs the engine in a thread and serves many coroutines."""

import asyncio

from quire import AsyncLLM, SamplingParams


async def stream(llm: AsyncLLM, name: str, prompt: str) -> str:
    sampling = SamplingParams(temperature=0, max_tokens=16)
    text = ""
    async for result in llm.generate(prompt, sampling):
        delta = result.outputs[0].text[len(text) :]  # each result has the whole text so far
        text += delta
        print(f"{name}: {delta!r}")
    return text


async def main() -> None:
    llm = AsyncLLM(max_num_seqs=8)
    try:
        texts = await asyncio.gather(
            stream(llm, "a", "The capital of France is"), stream(llm, "b", "Once upon a time")
        )
        print("a said", repr(texts[0]))
        print("b said", repr(texts[1]))
    finally:
        llm.close()


if __name__ == "__main__":
    asyncio.run(main())
