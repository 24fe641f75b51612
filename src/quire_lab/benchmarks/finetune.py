"""A format that the built-in model does not know, learned on this machine and served:
`python -m quire_lab.benchmarks.finetune --data-dir DIR [--output FILE]`.

Trains on short questions of GSM8K, asks held-out ones without any instruction before and after through an engine that
serves the adapter, and compares the adapter's tokens with those of PEFT's merged model (float32 both).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.machine import describe_machine, describe_versions
from quire.train.finetune import FinetuneJob, finetune
from quire.train.settings import TrainSettings
from quire.train.trainer import TrainedStep
from quire.weights.builtin import BUILTIN
from quire_lab.experiments.tuning import FORM, GOAL, Task, read_tasks
from quire_lab.report.data import DataFolder

BATCH_SIZE = 16
MAX_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="has gsm8k/test.jsonl (default: the first of the usual folders)")
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--steps", type=int, default=40, help=f"of {BATCH_SIZE} examples, two epochs")
    parser.add_argument("--held-out", type=int, default=94, help="questions, the last of the file")
    parser.add_argument("--compared", type=int, default=12, help="answers compared with PEFT's; 0: none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = DataFolder.at(options.data_dir).folder
    path = None if folder is None else folder / "gsm8k" / "test.jsonl"
    if path is None or not path.is_file():
        parser.error(f"gsm8k/test.jsonl is not in {folder}: give --data-dir")
    tasks = read_tasks(path)
    shown, asked = tasks[: options.steps * BATCH_SIZE // 2], tasks[-options.held_out :]
    if len(shown) + len(asked) > len(tasks):
        parser.error(f"{path} has {len(tasks)} short questions: lower --steps or --held-out")
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(options, shown, asked, Path(scratch))
    record = {
        "benchmark": "finetune",
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {k: v for k, v in vars(options).items() if k not in ("output", "data_dir")},
        "data": f"{len(shown)} short questions of GSM8K's test part to train, the last {len(asked)} held out",
        "results": results,
    }
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in results.items() if k not in ("losses", "training")}, indent=1))


def measure(
    options: argparse.Namespace, shown: Sequence[Task], asked: Sequence[Task], scratch: Path
) -> dict[str, Any]:
    data, steps = scratch / "data.jsonl", list[TrainedStep]()
    data.write_text("".join(json.dumps({"messages": task.messages}) + "\n" for task in shown))
    settings = TrainSettings(
        epochs=2, batch_size=BATCH_SIZE, batch_tokens=1024, learning_rate=1e-3, validation_split=0.0
    )  # fmt: skip
    job = FinetuneJob(
        data, scratch / "mine", options.model, None, settings, device="cpu", num_threads=options.threads
    )  # fmt: skip

    def note(step: TrainedStep) -> None:
        steps.append(step)
        print(f"step {step.step}/{step.num_steps}  loss {step.loss:.4f}", flush=True)

    wall, cpu = time.monotonic(), time.process_time()
    finetune(job, note)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    llm = LLM(
        options.model,
        dtype="float32",
        quantization="none",
        lora_modules=(f"mine={job.output}",),
        num_threads=options.threads,
        use_tqdm=False,
    )
    chats = [task.messages[:1] for task in asked]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    before, after = (llm.chat(chats, sampling, use_tqdm=False, adapter=adapter) for adapter in (None, "mine"))
    num_after = _in_format(after)
    result: dict[str, Any] = {
        "steps": len(steps),
        "tokens": sum(step.num_tokens for step in steps),
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "held_out": len(asked),
        "in_format_before": _in_format(before),
        "in_format_after": num_after,
        "goal_reached": num_after >= GOAL * len(asked),
        "losses": [round(step.loss, 4) for step in steps],
        "training": asdict(settings),
    }
    if options.compared:
        some = after[: options.compared]
        theirs = merged_answers(options.model, job.output, [output.prompt_token_ids for output in some])
        own = [list(output.outputs[0].token_ids) for output in some]
        result["same_as_peft_merged"] = (
            f"{sum(a == b for a, b in zip(own, theirs, strict=True))} of {len(own)}"
        )
    return result


def _in_format(outputs: Sequence[Any]) -> int:
    return sum(FORM.fullmatch(output.outputs[0].text.strip()) is not None for output in outputs)


def merged_answers(model: str | None, adapter: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens of the base with the adapter merged into its weights, by transformers and PEFT."""
    import peft  # type: ignore[import-untyped]
    import torch
    import transformers

    where: dict[str, Any] = {"pretrained_model_name_or_path": model}
    if model is None:
        where = {"pretrained_model_name_or_path": BUILTIN.path.parent, "gguf_file": BUILTIN.path.name}
    base = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = merged.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


if __name__ == "__main__":
    main()
