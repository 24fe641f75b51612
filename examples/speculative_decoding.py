"""Speculative decoding by prompt lookup: the same tokens, in less time where the answer repeats the prompt."""

import time
from typing import Any

from quire import LLM, SamplingParams

PASSAGE = (
    "Paged attention stores keys and values in blocks of a fixed size. A block table maps the positions of a "
    "sequence to blocks, so that memory is allocated when it is needed and shared where content is equal."
)
CHAT = [{"role": "user", "content": f"Repeat this text word for word: {PASSAGE}"}]


def timed(**settings: Any) -> tuple[float, list[int]]:
    with LLM(max_model_len=1024, **settings) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=64)
        llm.chat(CHAT, sampling, use_tqdm=False)  # warm-up
        start = time.perf_counter()
        result = llm.chat(CHAT, sampling, use_tqdm=False)[0]
        return time.perf_counter() - start, result.outputs[0].token_ids


def main() -> None:
    plain_seconds, plain = timed()
    seconds, tokens = timed(speculative_config={"method": "ngram", "num_speculative_tokens": 8})
    print(f"plain        {plain_seconds:.3f} s, {len(plain)} tokens")
    print(f"speculating  {seconds:.3f} s, {len(tokens)} tokens")
    print("same tokens:", tokens == plain)


if __name__ == "__main__":
    main()
