"""Pooled: what an encoder makes of one text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pooled:
    request_id: str
    index: int  # which of the request's texts this is
    vector: bytes  # float32 in this machine's order; empty if there is an error
    num_tokens: int
    error: str | None = None
