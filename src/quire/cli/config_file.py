"""A file of flags: JSON, plain `key: value` lines, or any YAML where PyYAML is installed."""

import json
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
    "null": None,
    "~": None,
}


def read_config_file(path: str) -> dict[str, Any]:
    """The file's top-level mapping; ConfigError in one line if it is none."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({error})") from error
    found = _parsed(path, text)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a mapping from flags to values, not {type(found).__name__}")
    return {str(key): value for key, value in found.items()}


def _parsed(path: str, text: str) -> Any:
    if path.endswith(".json") or text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: is no valid JSON ({error})") from error
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        return _plain_lines(path, text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is no valid YAML ({' '.join(str(error).split())})") from error


def _plain_lines(path: str, text: str) -> dict[str, Any]:
    """What most config files need: one `key: value` a line, # comments. Anything nested asks for PyYAML."""
    found: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #", 1)[0].rstrip()
        if not bare or bare.startswith("#") or bare == "---":
            continue
        key, colon, value = bare.partition(":")
        value = value.strip()
        if not colon or line[0].isspace() or not value or value[0] in "[{|>&*":
            raise ConfigError(
                f"{path}: line {number} is no `key: value`: pip install pyyaml to read more than that"
            )
        found[key.strip().strip("\"'")] = _plain_value(value)
    return found


def _plain_value(value: str) -> Any:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
