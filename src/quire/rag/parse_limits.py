"""Limits of one parse."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParseLimits:
    seconds: float = 10.0
    memory_bytes: int = 512 << 20  # of address space, the interpreter's own included
    max_pages: int = 2000
    max_characters: int = 20_000_000  # about OpenAI's 5 million tokens
    max_expanded_bytes: int = 128 << 20  # of a compressed file's text
