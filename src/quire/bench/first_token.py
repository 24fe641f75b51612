"""Run as a process of its own by `bench startup`: starts an LLM, generates, prints one JSON line with clock times.

Importing is part of what is measured, so the imports below are timed, in the order in which they cost.
"""

import json
import sys
import time

started = time.time()
import numpy  # noqa: E402, F401
import torch  # noqa: E402, F401

torch_ready = time.time()
from quire.bench.machine import resident_bytes  # noqa: E402
from quire.core.sampling import SamplingParams  # noqa: E402
from quire.llm.llm import LLM  # noqa: E402
from quire.text.prompts import prepare  # noqa: E402

imported = time.time()


def main(text: str) -> None:
    """`text` is JSON: settings of the LLM, the prompt and the number of tokens to generate."""
    plan = json.loads(text)
    llm = LLM(use_tqdm=False, **plan["settings"])
    loaded = time.time()
    sampling = SamplingParams(temperature=0.0, max_tokens=plan["num_tokens"], ignore_eos=True)
    prompt = plan["prompt"] if llm.tokenizer is not None else {"prompt_token_ids": [1]}
    first_token = 0.0
    for piece in llm.stream(prepare(prompt, llm.tokenizer), sampling):
        first_token = first_token or time.time()
        num_tokens = piece.num_tokens
    ended = time.time()
    clock = {
        "started": started,
        "torch_ready": torch_ready,
        "imported": imported,
        "loaded": loaded,
        "first_token": first_token,
        "ended": ended,
    }
    print(json.dumps({"clock": clock, "num_tokens": num_tokens, "resident_bytes": resident_bytes()}))
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
