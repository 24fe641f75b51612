"""A Step as bytes: what ranks other than 0 need of it. JSON: plain numbers and names, which run nothing when read.

Only rank 0 samples, so sampling parameters, beams and masks stay there. Both ends are the same version.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import astuple, fields
from operator import attrgetter
from typing import Any

from quire.core.draft import Draft
from quire.core.errors import EngineDead
from quire.core.request import Ints, ints
from quire.core.sampling import SamplingParams
from quire.core.step import AdapterLoad, HostTransfers, RowStart, Step

_ARRAYS = [f.name for f in fields(Step) if f.type is Ints and f.name not in ("masked", "drawn")]
_of_start = attrgetter(
    "row", "token_ids", "block_ids", "sampling.prompt_logprobs", "num_prompt_tokens", "adapter"
)
Blob = tuple[Any, bytes]  # what describes some bytes, and the bytes


def encode_step(step: Step, blobs: Sequence[Blob] = ()) -> tuple[bytes, ...]:
    """Frames: the step with the descriptions of `blobs`, which go with its adapter loads; then the bytes of each."""
    message = (
        step.step_id,
        [getattr(step, name).tobytes().hex() for name in _ARRAYS],  # faster than lists
        list(map(_of_start, step.starts)),
        [(draft.row, draft.position, draft.token_ids, draft.parents) for draft in step.drafts],
        None if step.moves is None else astuple(step.moves),
        step.adapter_evictions,
        [(load.key, load.block_ids) for load in step.adapter_loads],
        [described for described, _ in blobs],
    )
    text = json.dumps(message, default=list, separators=(",", ":"))  # list: of arrays
    return text.encode(), *(content for _, content in blobs)


def decode_step(data: bytes) -> tuple[Step, list[Any]]:
    """The step, and the description of each frame that follows. EngineDead for bytes that are no Step: without it this
    rank cannot go on.
    """
    try:
        step_id, arrays, starts, drafts, moves, evictions, loads, described = json.loads(data)
        decoded = (array("i", bytes.fromhex(values)) for values in arrays)
        fixed: dict[str, Any] = dict(zip(_ARRAYS, decoded, strict=True))
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
    except Exception as error:
        raise EngineDead(
            f"{len(data)} bytes from rank 0 are no step ({type(error).__name__}: {error}): restart the engine"
        ) from error
    return step, list(described)


def _start(row: int, tokens: Any, blocks: Any, scored: int | None, num_prompt: int, adapter: Any) -> RowStart:
    sampling = SamplingParams(prompt_logprobs=scored)
    return RowStart(row, ints(tokens), ints(blocks), sampling, 0, 0, num_prompt, adapter=adapter)
