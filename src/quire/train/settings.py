"""Settings of a fine-tuning run, and what `auto` becomes for a model and its data. No torch: a server checks them."""

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from quire.adapters.settings import MAX_RANK
from quire.core.config import one_of, setting
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
MAX_TARGETS, MAX_NAME = 256, 256  # names of layers, characters of one


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """None is `auto`: `resolved` fills it in. All but the method carry the text of their flag."""

    method: str = SUPERVISED
    epochs: int | None = setting(None, "passes over the data (default: auto)")
    batch_size: int | None = setting(None, "examples of a step (default: auto)")
    batch_tokens: int | None = setting(
        None, "tokens computed at a time; a step sums gradients over several (default: auto)"
    )
    learning_rate: float | None = setting(None, "highest rate (default: auto)")
    learning_rate_multiplier: float = setting(1.0, "factor of the automatic rate (default: 1)")
    schedule: str = setting("cosine", "course of the rate after the warm-up", choices=SCHEDULES)
    warmup: float = setting(0.05, "share of the steps in which the rate rises")
    clip: float = setting(1.0, "largest norm of a gradient (default: 1.0; 0: none)")
    weight_decay: float = setting(0.0, "weight decay of AdamW (default: 0)")
    optimizer: str = setting("adamw", "AdamW with states in 32 or 8 bits", choices=tuple(BITS))
    max_length: int | None = setting(None, "most tokens of an example (default: the context, at most 4096)")
    validation_split: float = setting(0.1, "share of the data that is held out")
    beta: float = setting(0.1, "beta of dpo")
    seed: int = setting(0, "the same seed gives the same adapter")
    checkpoint_steps: int | None = setting(None, "steps between checkpoints (default: ten in all)")
    keep_checkpoints: int = setting(3, "newest checkpoints that are kept")
    rank: int = setting(16, "rank of the adapter", "--rank", "-r")
    alpha: float | None = setting(None, "scale of the adapter times its rank (default: twice the rank)")
    dropout: float = setting(0.0, "dropout of the adapter's inputs (default: 0)")
    targets: tuple[str, ...] = setting(
        (ALL,),
        "linear layers to adapt, such as q_proj v_proj (default: all-linear)",
        "--target-modules",
        nargs="+",
        metavar="NAME",
    )
    qlora: bool | None = setting(
        None,
        "keep the base in 4 bits: NF4, or its own blocks (default: if the checkpoint has fewer than 8 bits)",
    )
    recompute: bool = setting(
        False,
        "keep only the inputs of layers for the backward pass",
        "--gradient-checkpointing",
        action="store_true",
    )
    paged: bool = setting(
        False,
        "keep optimizer states in host memory (always where a GPU is full)",
        "--offload-optimizer",
        action="store_true",
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), get_args(field.type) or (field.type,)
            if value is not None and not _fits(value, kinds):
                raise ConfigError(f"{field.name}={str(value)[:80]!r} cannot work: give {kinds[0].__name__}")
        counts = ("epochs", "batch_size", "batch_tokens", "max_length")
        for name in (*counts, "checkpoint_steps", "keep_checkpoints"):
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
            one_of(name, getattr(self, name), known)
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


def _fits(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Whether it has one of these types, and is small: a request's values are kept with its job."""
    if isinstance(value, tuple):
        return ... in kinds and len(value) <= MAX_TARGETS and all(_fits(one, kinds) for one in value)
    if isinstance(value, str):
        return str in kinds and len(value) <= MAX_NAME and value.isprintable()
    return (type(value) in kinds or (type(value) is int and float in kinds)) and abs(value) < 2**63


def _check(name: str, value: Any, is_good: Any, what: str) -> None:
    if value is not None and not is_good(value):
        raise ConfigError(f"{name}={value!r} cannot work: give {what}")
