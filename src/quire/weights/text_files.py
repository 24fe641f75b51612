"""Reads text and JSON files of a model; a file that is damaged is named."""

import json
from pathlib import Path
from typing import Any

from quire.core.errors import WeightsError

_LARGEST_INT = 2**63 - 1


def read_text(path: Path) -> str | None:
    """The file's text, or None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"cannot be read ({error})") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The file's JSON object, or None if there is no such file."""
    value = read_any_json(path)
    if isinstance(value, dict) or not path.exists():
        return value
    raise damaged(path, f"holds a {type(value).__name__}, not a JSON object")


def damaged(path: Path, problem: str) -> WeightsError:
    return WeightsError(f"{path} {problem}: fetch or copy it again")


def read_any_json(path: Path) -> Any:
    """The file's JSON value, or None if there is no such file. Whole numbers are clamped to 64 bits."""
    text = read_text(path)
    try:
        return None if text is None else json.loads(text, parse_int=_clamped)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not valid JSON ({error})") from error


def _clamped(digits: str) -> int:
    """Messages between processes hold 64 bits, and transformers writes 10^30 for "no limit"."""
    if len(digits) > 20:  # also spares the conversion of a million digits
        return -_LARGEST_INT if digits.startswith("-") else _LARGEST_INT
    return max(-_LARGEST_INT, min(int(digits), _LARGEST_INT))
