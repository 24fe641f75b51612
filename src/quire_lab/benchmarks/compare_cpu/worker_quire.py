"""The Quire worker: the engine in-process, as a user of `quire.LLM` has it."""

from typing import Any

from quire import LLM, SamplingParams, __version__
from quire_lab.benchmarks.compare_cpu.harness import WorkerJob, run_worker


class Quire:
    """Defaults and the job's quantization; the batch limit is the number of requests, as it is for the peers."""

    def __init__(self, job: WorkerJob) -> None:
        self.settings: dict[str, Any] = {
            "quantization": job.options["quantization"],
            "max_num_seqs": job.num_requests,
            "enable_prefix_caching": False,
        }
        self.llm = LLM(model=job.model, use_tqdm=False, **self.settings)
        self.versions = {"quire": __version__}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        answers = self.llm.generate(batch, sampling, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]


if __name__ == "__main__":
    run_worker(Quire)
