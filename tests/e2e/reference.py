"""The built-in model in `transformers`, loaded by its own GGUF reader: independent of all of Quire."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from quire.weights.builtin import builtin_path


@dataclass(frozen=True)
class Difference:
    """Where a generated token is not the reference's best: by how much the best is better."""

    prompt: int
    position: int
    gap: float


@cache
def reference_model() -> torch.nn.Module:
    path: Path = builtin_path()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def reference_logits(prompt: list[int], output: list[int]) -> torch.Tensor:
    """[len(output), vocab] float32: what the reference draws each of these tokens from."""
    token_ids = torch.tensor([prompt + output])
    return reference_model()(token_ids, logits_to_keep=len(output) + 1).logits[0, :-1]


def greedy_differences(prompt_index: int, prompt: list[int], output: list[int]) -> list[Difference]:
    """Where the output leaves the reference's greedy path, given the same tokens before.

    By induction an output without differences is exactly what the reference would generate.
    """
    logits = reference_logits(prompt, output)
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    wrong = (logits.argmax(dim=-1) != torch.tensor(output)).nonzero().flatten().tolist()
    return [Difference(prompt_index, i, float(best[i] - chosen[i])) for i in wrong]
