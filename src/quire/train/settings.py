"""Settings of a fine-tuning run, and what `auto` becomes for a model and its data. No torch: a server checks them."""

from dataclasses import dataclass, fields, replace
from typing import Any

from quire.adapters.settings import MAX_RANK
from quire.core.errors import ConfigError

AUTO = "auto"
ALL = "all-linear"  # a target: every linear layer but the output head
SUPERVISED, DPO = "supervised", "dpo"
METHODS = (SUPERVISED, DPO)
SCHEDULES = ("cosine", "constant", "linear")
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"  # how a run ends
BITS = {"adamw": 32, "adamw8bit": 8}  # of optimizer states
MANY_PARAMETERS = 10**9  # models above it learn with the lower rate
RATES = (5e-4, 2e-4)
GOAL_STEPS = 150  # what automatic epochs aim at
CPU_TOKENS, GPU_TOKENS = 2048, 8192  # of a packed batch
MAX_EPOCHS = 50


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """None is `auto`: `resolved` fills it in."""

    method: str = SUPERVISED
    rank: int = 16
    alpha: float | None = None  # auto: twice the rank
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL,)
    epochs: int | None = None
    batch_size: int | None = None  # examples of an optimizer step
    batch_tokens: int | None = None  # of one packed batch; a step accumulates gradients over several
    learning_rate: float | None = None
    learning_rate_multiplier: float = 1.0
    schedule: str = "cosine"
    warmup: float = 0.05  # share of all steps
    clip: float = 1.0  # largest norm of a step's gradient; 0: none
    weight_decay: float = 0.0
    optimizer: str = "adamw"
    recompute: bool = False  # activation checkpointing
    qlora: bool | None = None  # auto: where the checkpoint has fewer than 8 bits a weight
    beta: float = 0.1  # of DPO
    max_length: int | None = None  # tokens of an example; auto: the model's context, at most 4,096
    validation_split: float = 0.1
    checkpoint_steps: int | None = None  # auto: ten in all
    keep_checkpoints: int = 3
    seed: int = 0
    paged: bool = (
        False  # optimizer states in host memory; they go there by themselves where the device is full
    )

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "batch_size",
            "batch_tokens",
            "max_length",
            "checkpoint_steps",
            "keep_checkpoints",
        ):
            _check(name, getattr(self, name), lambda value: value >= 1, "1 or more")
        _check("epochs", self.epochs, lambda value: value <= MAX_EPOCHS, f"at most {MAX_EPOCHS}")
        _check("rank", self.rank, lambda value: 1 <= value <= MAX_RANK, f"1 to {MAX_RANK}")
        for name in ("alpha", "learning_rate", "learning_rate_multiplier", "beta"):
            _check(name, getattr(self, name), lambda value: value > 0, "more than 0")
        for name in ("dropout", "warmup", "validation_split"):
            _check(name, getattr(self, name), lambda value: 0 <= value < 1, "0 or more and below 1")
        for name in ("clip", "weight_decay", "seed"):
            _check(name, getattr(self, name), lambda value: value >= 0, "0 or more")
        for name, known in (("method", METHODS), ("schedule", SCHEDULES), ("optimizer", tuple(BITS))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not known: choose one of {', '.join(known)}"
                )
        if not self.targets:
            raise ConfigError(f"targets names no module: give some, or {ALL}")

    @classmethod
    def of(cls, **given: Any) -> "TrainSettings":
        """From names and values; `auto` leaves a choice open. ConfigError for an unknown name."""
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"{name!r} is no setting of fine-tuning: choose of {', '.join(sorted(known))}"
                )
        return cls(**{name: value for name, value in given.items() if value is not None and value != AUTO})

    def resolved(self, num_items: int, num_parameters: int, on_gpu: bool) -> "TrainSettings":
        """Without `auto`, for this number of training items."""
        batch_size = self.batch_size or max(4, min(32, num_items // 30))
        steps = -(-num_items // batch_size)
        epochs = self.epochs or max(1, min(MAX_EPOCHS if num_items < 100 else 10, round(GOAL_STEPS / steps)))
        rate = self.learning_rate or RATES[num_parameters > MANY_PARAMETERS] * self.learning_rate_multiplier
        return replace(
            self,
            alpha=self.alpha or 2.0 * self.rank,
            batch_size=batch_size,
            epochs=epochs,
            learning_rate=rate,
            batch_tokens=self.batch_tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS),
            checkpoint_steps=self.checkpoint_steps or max(1, -(-steps * epochs // 10)),
        )


def _check(name: str, value: Any, is_good: Any, what: str) -> None:
    if value is not None and not is_good(value):
        raise ConfigError(f"{name}={value!r} cannot work: give {what}")
