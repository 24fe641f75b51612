"""CrossMemory: paged memory of an encoder-decoder model, whose first blocks are the encoder's."""

import hashlib

from quire.core.request import Request, Sequence, ints
from quire.memory.paged import PagedMemory


class CrossMemory(PagedMemory):
    """K and V of cross-attention depend on the whole prompt, so a prompt is found whole or not at all."""

    def match_prefix(self, sequence: Sequence) -> int:
        num_found = super().match_prefix(sequence)
        if 0 < num_found < sequence.request.num_encoder_tokens:  # the index has lost some of its blocks
            self.release(sequence)
            return 0
        return num_found

    def _salt(self, request: Request) -> str:
        """A block's hash covers all of the encoder's tokens, not only those up to its end."""
        token_ids = ints(request.prompt_token_ids[: request.num_encoder_tokens])
        return f"{super()._salt(request)}\0{hashlib.sha256(token_ids.tobytes()).hexdigest()}"
