"""The OpenVINO GenAI worker: its continuous batching pipeline, which reads the GGUF directly.

Settings, and why (tried on 2 Emerald Rapids cores, AVX-512 and AMX):
- INFERENCE_PRECISION_HINT=f32 is what it chooses itself on CPUs without bf16. With bf16 it would choose bf16,
  and this pinned version then ended by an illegal instruction (an AMX kernel ran with no tiles configured);
  with AMX switched off, bf16 and f16 prefilled at half the speed of f32 and decoded slower.
  `--openvino-precision auto` leaves the choice to it.
- Dynamic quantization of activations (groups of 32) and the 8-bit KV cache are its defaults, and faster than
  without: off cost a quarter at n=1, a KV cache in f32 half at n=8 (the latter on a busy machine).
- max_num_batched_tokens=512: at n=32 it prefilled faster than 256 (its default) and 4096, but that was one run
  each on a busy machine: the weakest choice here, worth trying again.
- KV blocks are allocated as needed (cache_size=0, its default); prefix caching off.
"""

from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from quire_lab.benchmarks.compare_cpu.harness import WorkerJob, run_worker


class OpenVino:
    """ContinuousBatchingPipeline, fed with token ids: no tokenizer takes part."""

    def __init__(self, job: WorkerJob) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = max(job.num_requests, 1)
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
        precision = job.options.get("precision", "f32")
        if precision != "auto":
            properties["INFERENCE_PRECISION_HINT"] = precision
        self.pipeline = genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        self.versions = {"openvino-genai": genai.__version__, "openvino": openvino.__version__}
        self.settings = properties | {
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "enable_prefix_caching": scheduler.enable_prefix_caching,
        }

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        answers = self.pipeline.generate(tensors, [config] * len(prompts))
        return [len(answer.m_generation_ids[0]) for answer in answers]


if __name__ == "__main__":
    run_worker(OpenVino)
