"""llama.cpp's logits of texts, in an environment of its own.

`quire_lab.benchmarks.quality` starts it as `python -m quire_lab.benchmarks.llamacpp_logits MODEL TEXTS FOLDER THREADS`.

Texts are evaluated as prompts, in batches of 512 tokens at most: activations by blocks of 32 in 8 bits (Q8_1), KV in
float16, its defaults.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    model, texts, folder, threads = sys.argv[1:]
    llm = llama_cpp.Llama(
        model, n_ctx=1024, n_batch=512, logits_all=True, n_threads=int(threads), verbose=False
    )
    for index, token_ids in enumerate(json.loads(Path(texts).read_text())):
        llm.reset()
        llm.eval(token_ids)
        np.save(Path(folder) / f"{index}.npy", llm.scores[: len(token_ids)])
        print(index + 1, flush=True)
    system = llama_cpp.llama_print_system_info().decode().strip(" |\n")
    print(json.dumps({"llama-cpp-python": llama_cpp.__version__, "system_info": system}))


if __name__ == "__main__":
    main()
