"""Memory of training by ZeRO stage: parameters, gradients and optimizer states of each rank. No torch.

ZeRO's formulas: with P parameters, N ranks and K bytes of optimizer states for each parameter (12 in mixed precision:
a float32 copy and Adam's two states), a rank keeps 2P + 2P + KP bytes in stage 0, 2P + 2P + KP / N in stage 1,
2P + (2 + K) P / N in stage 2 and (4 + K) P / N in stage 3.
"""

from dataclasses import dataclass

STAGES = (0, 1, 2, 3)
MIXED_STATE = 12  # float32 parameters, momentum and variance
HALF, SINGLE = 2, 4


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def full_training(num_parameters: int, ranks: int) -> tuple[StageMemory, ...]:
    """All parameters trained with Adam in mixed precision."""
    return tuple(
        StageMemory(
            stage,
            HALF * num_parameters / (ranks if stage >= 3 else 1),
            HALF * num_parameters / (ranks if stage >= 2 else 1),
            MIXED_STATE * num_parameters / (ranks if stage >= 1 else 1),
        )
        for stage in STAGES
    )


def lora_training(base_bytes: float, trained: int, ranks: int) -> tuple[StageMemory, ...]:
    """A frozen base and `trained` float32 parameters, with states of AdamW in 32 bits."""
    stages = []
    for stage in STAGES:
        parts = trained_bytes(stage, ranks, trained, base_bytes)
        stages.append(
            StageMemory(stage, parts["base"] + parts["parameters"], parts["gradients"], parts["optimizer"])
        )
    return tuple(stages)


def trained_bytes(stage: int, ranks: int, trained: int, base_bytes: float) -> dict[str, float]:
    """What one rank of `quire finetune` keeps between steps."""
    return {
        "parameters": SINGLE * trained / (ranks if stage >= 3 else 1),
        "gradients": SINGLE * trained / (ranks if stage >= 2 else 1),
        "optimizer": 2 * SINGLE * trained / (ranks if stage >= 1 else 1),
        "base": base_bytes / (ranks if stage >= 3 else 1),
    }
