"""What to say of a flag that is not known here: what other engines call it, or the nearest one that there is."""

import difflib
from collections.abc import Collection

_ONE_DEVICE = "a model runs on one device here: leave it out"
_ALWAYS = "it is always so here: leave it out"

# vLLM's, SGLang's and llama.cpp's names, for what has another name here or needs none
OTHERS = {
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--distributed-executor-backend": _ONE_DEVICE,
    "--enable-chunked-prefill": _ALWAYS,
    "--async-scheduling": "--steps-in-flight 1, the default, is that",
    "--trust-remote-code": "no code of a model is ever run: leave it out",
    "--scheduling-policy": "use --schedule",
    "--num-gpu-blocks-override": "use --num-blocks",
    "--context-length": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "--max-seq-len": "use --max-model-len",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--max-running-requests": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--threads": "use --num-threads",
    "--model-path": "use --model",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--no-prefix-caching": "use --no-enable-prefix-caching",
    "--disable-log-requests": "requests are logged with --log-requests only: leave it out",
    "--no-enable-log-requests": "requests are logged with --log-requests only: leave it out",
    "--enable-log-requests": "use --log-requests",
    "--uvicorn-log-level": "use --log-level",
    "--speculative-model": "use --speculative-config",
    "--num-speculative-tokens": "use --speculative-config",
    "--guided-decoding-backend": "there is one backend: leave it out",
    "--max-log-len": "requests' text is never logged: leave it out",
    "--download-dir": "set HF_HOME or QUIRE_CACHE in the environment",
    "--task": "an encoder serves embeddings, a decoder text: leave it out",
    "--runner": "an encoder serves embeddings, a decoder text: leave it out",
}


def advice(flag: str, known: Collection[str]) -> str | None:
    """In a few words, or None where nothing is near."""
    name = flag.partition("=")[0].replace("_", "-")
    if name in known:
        return f"write {name}"
    if name in OTHERS:
        return OTHERS[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else None
