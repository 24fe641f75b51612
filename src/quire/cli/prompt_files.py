"""Prompts from flags, files and standard input."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from quire.core.errors import InvalidRequest

PromptEntry = str | Mapping[str, Any]  # text, or {"prompt"}, {"prompt_token_ids"} or {"messages"}


def gather_prompts(texts: Sequence[str], file: str | None, stdin: TextIO) -> list[PromptEntry]:
    """Those of --prompt, then those of --prompt-file; without either, standard input as one prompt."""
    prompts: list[PromptEntry] = list(texts)
    if file is not None:
        prompts += _from_file(file, stdin)
    elif not prompts:
        if stdin.isatty():
            raise InvalidRequest(
                "there is no prompt: give --prompt TEXT, --prompt-file FILE, or pipe a text in"
            )
        prompts.append(stdin.read().rstrip("\n"))
    if not prompts:
        raise InvalidRequest(f"{file} holds no prompt: write one per line")
    return prompts


def _from_file(file: str, stdin: TextIO) -> list[PromptEntry]:
    if file == "-":
        return [line for line in stdin.read().splitlines() if line.strip()]
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompt-file {file}: cannot be read ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if file.endswith((".jsonl", ".ndjson")):
        return [_entry(f"{file} line {number}", line) for number, line in numbered]
    return [line for _, line in numbered]


def _entry(place: str, line: str) -> PromptEntry:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{place}: is no valid JSON ({error})") from error
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict) or not {"prompt", "prompt_token_ids", "messages"} & set(entry):
        raise InvalidRequest(
            f'{place}: write a string or an object with "prompt", "prompt_token_ids" or "messages"'
        )
    return entry
