"""The llama.cpp worker: its own server with parallel slots, as the wheel `xllamacpp` has it prebuilt.

The server's whole batch is one POST to /completion with a list of prompts: the server makes one task per
prompt, so slots and continuous batching work as with many clients, and no client threads share our cores.

Settings, and why:
- One slot per request, continuous batching, a context of what one request needs; a thread per physical core.
- Flash attention (auto), the f16 KV cache, n_batch 2048 and n_ubatch 512 are its defaults, left alone.
- cache_prompt off per request and on the server, and no RAM for saved prompts: nothing is reused.

What it cannot do: the wheel is built for AVX2, so AVX-512, VNNI and AMX lie idle. `system_info` in the
results says what it used; a llama.cpp built on the machine itself may be faster.
"""

import json
import urllib.request
from typing import Any

import xllamacpp

from quire_lab.benchmarks.compare_cpu.harness import WorkerJob, run_worker


class LlamaCpp:
    """llama.cpp's server in this process, reached on 127.0.0.1."""

    def __init__(self, job: WorkerJob) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = job.model
        params.n_parallel = job.num_requests
        # Contexts are cut into equal slots; 256 is the step that llama.cpp rounds a slot to.
        per_slot = -(-(job.prompt_tokens + job.output_tokens) // 256) * 256
        params.n_ctx = per_slot * job.num_requests
        params.cont_batching = True
        params.cpuparams.n_threads = job.threads
        params.cpuparams_batch.n_threads = job.threads
        params.n_gpu_layers = 0
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        self.server = xllamacpp.Server(params)
        self.url = f"{self.server.listening_address.rstrip('/')}/completion"
        self.versions = {"xllamacpp": xllamacpp.__version__}
        self.settings: dict[str, Any] = {
            "threads": job.threads,
            "n_parallel": params.n_parallel,
            "n_ctx": params.n_ctx,
            "n_batch": params.n_batch,
            "n_ubatch": params.n_ubatch,
            "cache_prompt": False,
            "system_info": xllamacpp.get_system_info().strip(" |\n"),
        }

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        body = {
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        # No proxy of the environment may come between us and 127.0.0.1.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
            answer = json.load(response)
        answers = answer if isinstance(answer, list) else [answer]
        return [reply["tokens_predicted"] for reply in answers]


if __name__ == "__main__":
    run_worker(LlamaCpp)
