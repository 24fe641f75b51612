"""The built-in model in `transformers`, loaded by its own GGUF reader: independent of all of Quire."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from quire.weights.builtin import builtin_path

PASS = 8  # answers in one pass


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


Answer = tuple[list[int], list[int]]  # a prompt, and what was generated


@torch.inference_mode()
def reference_logits(answers: list[Answer]) -> list[torch.Tensor]:
    """[len(output), vocab] float32 for each answer: what the reference draws each of its tokens from.

    Answers of similar lengths share a pass, padded on the right, which no token before the padding sees: many small
    passes take several times as long.
    """
    model = reference_model()
    logits: dict[int, torch.Tensor] = {}
    order = sorted(range(len(answers)), key=lambda index: sum(map(len, answers[index])))
    for first in range(0, len(order), PASS):
        indices = order[first : first + PASS]
        rows = [torch.tensor(answers[index][0] + answers[index][1]) for index in indices]
        hidden = model.model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), use_cache=False)[0]
        for index, row in zip(indices, hidden, strict=True):
            prompt, output = map(len, answers[index])
            logits[index] = model.lm_head(row[prompt - 1 : prompt + output - 1])
    return [logits[index] for index in range(len(answers))]


def greedy_differences(answers: list[Answer]) -> list[list[Difference]]:
    """Where each output leaves the reference's greedy path, given the same tokens before.

    By induction an output without differences is exactly what the reference would generate.
    """
    return [
        _differences(index, logits, torch.tensor(output))
        for index, (logits, (_, output)) in enumerate(zip(reference_logits(answers), answers, strict=True))
    ]


def _differences(index: int, logits: torch.Tensor, output: torch.Tensor) -> list[Difference]:
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, output[:, None]).squeeze(1)
    wrong = (logits.argmax(dim=-1) != output).nonzero().flatten().tolist()
    return [Difference(index, i, float(best[i] - chosen[i])) for i in wrong]
