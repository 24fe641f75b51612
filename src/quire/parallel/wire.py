"""A Step as bytes: what ranks other than 0 need of it. JSON: plain numbers and names, which run nothing when read.

Only rank 0 samples, so sampling parameters, beams and masks stay there. Both ends are the same version.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

from quire.core.draft import Draft
from quire.core.errors import EngineDead
from quire.core.request import ints
from quire.core.sampling import SamplingParams
from quire.core.step import AdapterLoad, HostTransfers, RowStart, Step

# Arrays of a Step, as they are.
_ARRAYS = (
    *("rows", "num_computed", "num_tokens", "sample_sources", "sample_rows"),
    *("table_rows", "table_indices", "table_blocks", "copy_sources", "copy_targets"),
    *("forced_rows", "forced_positions", "forced_tokens", "sample_offsets"),
)
_LENGTH = struct.Struct("<I")
_MOVES = ("out_blocks", "out_hosts", "in_hosts", "in_blocks")


Blob = tuple[Any, bytes]  # what describes some bytes, and the bytes


def encode_step(step: Step, blobs: Sequence[Blob] = ()) -> bytes:
    """`blobs`: what goes with the step's adapter loads."""
    starts = [
        (
            start.row, start.token_ids, start.block_ids, start.sampling.prompt_logprobs, start.num_prompt_tokens,
            start.adapter,
        )
        for start in step.starts
    ]  # fmt: skip
    message = (
        step.step_id,
        [getattr(step, name) for name in _ARRAYS],
        starts,
        [(draft.row, draft.position, draft.token_ids, draft.parents) for draft in step.drafts],
        None if step.moves is None else [getattr(step.moves, name) for name in _MOVES],
        step.adapter_evictions,
        [(load.key, load.block_ids) for load in step.adapter_loads],
        [(described, len(content)) for described, content in blobs],
    )
    text = json.dumps(message, default=list, separators=(",", ":")).encode()  # list: of arrays
    return b"".join((_LENGTH.pack(len(text)), text, *(content for _, content in blobs)))


def decode_step(data: bytes) -> tuple[Step, list[Blob]]:
    """EngineDead for bytes that are no Step: without it this rank cannot go on."""
    try:
        return _decode_step(data)
    except Exception as error:
        raise EngineDead(
            f"{len(data)} bytes from rank 0 are no step ({type(error).__name__}: {error}): restart the engine"
        ) from error


def _decode_step(data: bytes) -> tuple[Step, list[Blob]]:
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    step_id, arrays, starts, drafts, moves, evictions, loads, described = json.loads(data[_LENGTH.size : end])
    blobs = []
    for what, size in described:
        blobs.append((what, data[end : end + size]))
        end += size
    fixed: dict[str, Any] = {name: ints(values) for name, values in zip(_ARRAYS, arrays, strict=True)}
    step = Step(
        step_id=step_id,
        starts=tuple(_start(*start) for start in starts),
        drafts=tuple(
            Draft(row, position, ints(tokens), ints(parents)) for row, position, tokens, parents in drafts
        ),
        moves=None if moves is None else HostTransfers(*map(ints, moves)),
        adapter_evictions=tuple(evictions),
        adapter_loads=tuple(AdapterLoad(key, ints(blocks)) for key, blocks in loads),
        **fixed,
    )
    return step, blobs


def _start(
    row: int,
    token_ids: Any,
    block_ids: Any,
    prompt_logprobs: int | None,
    num_prompt: int,
    adapter: str | None,
) -> RowStart:
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    return RowStart(row, ints(token_ids), ints(block_ids), sampling, 0, 0, num_prompt, adapter=adapter)
