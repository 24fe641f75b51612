"""Tuning: sizes of the attention kernels' tiles, and which serve a step of so many rows. Needs no Triton."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that change speed and never results, but for the last bits. Measured defaults for Hopper."""

    decode_tile: int = 64  # keys per iteration
    decode_warps: int = 2
    decode_stages: int = 2
    decode_registers: int | None = None  # per thread at most: fewer let more programs share a multiprocessor
    decode_pieces: int = 4  # pieces per multiprocessor that decodes are cut into, about
    fused_reduction: bool = True  # the last piece of a row to finish adds its pieces up; else a second kernel
    prompt_rows: int = 128  # queries × heads of a group per program
    prompt_tile: int = 64  # keys per iteration
    prompt_warps: int = 8
    prompt_stages: int = 3
    prompt_programs: int = 32  # per multiprocessor at most; further tiles go round


Ranges = tuple[tuple[int, Tuning], ...]  # (up to so many rows, tuning), ascending

# One row needs many small pieces to reach every multiprocessor; more rows need programs that start fast and of which
# many fit a multiprocessor at once, since in a served model the chip's clock falls to what its power allows.
# Measured on an H200, the second with products between the layers; `tune` measures anywhere else.
TUNINGS: Ranges = (
    (16, Tuning(decode_tile=32, decode_pieces=16)),
    (1 << 30, Tuning()),
)
