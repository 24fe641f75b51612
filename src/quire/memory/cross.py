"""CrossMemory: paged memory of an encoder-decoder model, whose first blocks are the encoder's."""

import hashlib
from collections.abc import Callable

from quire.core.request import Request, Sequence, ints
from quire.memory.paged import PagedMemory


class CrossMemory(PagedMemory):
    """K and V of cross-attention depend on the whole prompt, so a prompt is found whole or not at all."""

    def _num_hit(
        self, sequence: Sequence, hashes: list[bytes], num_held: int, find: Callable[[bytes], object]
    ) -> int:
        num_hit = super()._num_hit(sequence, hashes, num_held, find)
        return num_hit if num_hit * self.block_size >= sequence.request.num_encoder_tokens else num_held

    def _salt(self, request: Request) -> str:
        """A block's hash covers all of the encoder's tokens, not only those up to its end."""
        token_ids = ints(request.prompt_token_ids[: request.num_encoder_tokens])
        return f"{super()._salt(request)}\0{hashlib.sha256(token_ids.tobytes()).hexdigest()}"
