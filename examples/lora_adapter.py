"""Base model and LoRA adapter in one batch. Without a folder, a random adapter is made in memory.

Usage: python examples/lora_adapter.py [FOLDER SAVED BY PEFT]
"""

import sys

import torch

from quire import LLM, SamplingParams

NUM_LAYERS, HIDDEN, RANK = 30, 576, 8  # SmolLM2-135M, the built-in model


def random_adapter() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Tensors and configuration as PEFT saves them; only the output projection of attention is changed."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(NUM_LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * 0.2
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator) * 0.2
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["o_proj"]}
    return tensors, config


def main(folder: str | None) -> None:
    prompts = ["The capital of France is"] * 2
    greedy = SamplingParams(temperature=0, max_tokens=12)
    modules = {"mine": folder} if folder else {}
    with LLM(enable_lora=True, lora_modules=modules) as llm:
        if not folder:
            llm.add_adapter("mine", *random_adapter())
        print("adapters:", llm.adapters())
        names = [None, "mine"]  # one per prompt; None is the base model
        results = llm.generate(prompts, greedy, adapter=names, use_tqdm=False)
        for name, result in zip(names, results, strict=True):
            print(f"{name or 'base'}: {result.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
