"""The parts that config classes are made of: a field with its help text, and checks that name the setting."""

from dataclasses import MISSING, field
from typing import Any

from quire.core.errors import ConfigError


def setting(default: Any = MISSING, help: str = "") -> Any:
    """A dataclass field whose `help` is the text of its command-line flag and its only documentation."""
    return field(default=default, metadata={"help": help})


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known: choose one of {', '.join(allowed)}")


def at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and (not isinstance(value, int) or value < low):
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")


def not_negative(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise ConfigError(f"{name}={value!r} must be a number of at least 0")
