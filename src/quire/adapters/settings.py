"""An adapter's adapter_config.json: the fields that are served, and the ones that are refused."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import AdapterError

MAX_RANK = 512
# Fields that change what the adapter computes in a way that is not served: (field, what it is, what to do)
_REFUSED = (
    ("use_dora", "is a DoRA adapter", "merge it into the model, or train it without use_dora"),
    ("modules_to_save", "brings whole modules of its own (modules_to_save)", "merge it into the model"),
    ("lora_bias", "has biases (lora_bias)", "train it without"),
    ("layer_replication", "repeats layers (layer_replication)", "merge it into the model"),
    ("target_parameters", "targets bare parameters (target_parameters)", "merge it into the model"),
    ("trainable_token_indices", "brings token embeddings of its own", "merge it into the model"),
    ("alora_invocation_tokens", "is an activated LoRA", "train it without alora_invocation_tokens"),
    ("use_qalora", "is a QALoRA adapter", "merge it into the model"),
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    base: str = ""  # the name of the model that it was trained on
    target_modules: tuple[str, ...] = ()  # empty where it is an expression

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of the adapter's B A x."""
        alpha = float(_matching(self.alpha_pattern, module, self.alpha))
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _matching(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """A pattern names a module by the end of its path, or by an expression for it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return usual


def read_settings(name: str, config: Mapping[str, Any]) -> LoraSettings:
    """Checked; AdapterError names the adapter and the reason."""
    kind = str(config.get("peft_type", "LORA")).rpartition(".")[2]
    if kind != "LORA":
        raise AdapterError(f"adapter {name!r} is of type {kind}: only LORA can be served")
    for key, what, remedy in _REFUSED:
        if config.get(key):
            raise AdapterError(f"adapter {name!r} {what}, which cannot be served beside others: {remedy}")
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"adapter {name!r} trained biases (bias={config['bias']!r}): only bias='none' can be served"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"adapter {name!r} was begun with {start}, which changes the base model too: convert it to a plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion)"
        )
    try:
        targets = config.get("target_modules") or ()
        return LoraSettings(
            rank=int(config["r"]),
            alpha=float(config.get("lora_alpha", config["r"])),
            rank_pattern={str(k): int(v) for k, v in (config.get("rank_pattern") or {}).items()},
            alpha_pattern={str(k): float(v) for k, v in (config.get("alpha_pattern") or {}).items()},
            rslora=bool(config.get("use_rslora", False)),
            base=str(config.get("base_model_name_or_path") or ""),
            target_modules=() if isinstance(targets, str) else tuple(map(str, targets)),
        )
    except (KeyError, TypeError, ValueError, re.error) as error:
        raise AdapterError(
            f"adapter {name!r} has a broken adapter_config.json ({error!r}): save it again"
        ) from error


def check_rank(name: str, module: str, rank: int, limit: int | None) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise AdapterError(f"adapter {name!r} has rank {rank} at {module}: 1 to {MAX_RANK} can be served")
    if limit is not None and rank > limit:
        raise AdapterError(
            f"adapter {name!r} has rank {rank} at {module}: raise max_lora_rank, which is {limit}"
        )
