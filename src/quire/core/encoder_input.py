"""EncoderInput: what an encoder-decoder model makes of a prompt, and its limits."""

from dataclasses import dataclass, replace

from quire.core.errors import ContextExceeded, InvalidRequest
from quire.core.request import Request


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The prompt is the encoder's input. The decoder begins with tokens of its own, in a block of its own.

    A sequence's table has the encoder's blocks first: they hold K and V of cross-attention, and the decoder's follow.
    So one table, one layout and one reference count serve both, and nothing is written into the first kind twice.
    """

    # decoder_start_token_id, and a first token that generation_config.json forces
    decoder_start: tuple[int, ...]
    pad_token_id: int  # fills the last block of the prompt; the encoder does not see it
    max_tokens: int  # of the encoder's input
    max_outputs: int  # positions of the decoder

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for what these models cannot do."""
        if request.num_prompt_tokens > self.max_tokens:
            raise InvalidRequest(
                f"the prompt has {request.num_prompt_tokens} tokens and the model's encoder takes at most "
                f"{self.max_tokens}: shorten it, or raise max_model_len and max_num_batched_tokens if they are set",
                "prompt",
            )
        if request.sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is not available from an encoder-decoder model, whose encoder predicts no tokens: "
                "leave it out",
                "prompt_logprobs",
            )

    def expand(self, request: Request, block_size: int, max_model_len: int) -> Request:
        """The request as sequences have it: its prompt in whole blocks, then the decoder's first tokens.

        `max_len` is the longest that a sequence may become. Raises ContextExceeded where no output would fit.
        """
        num_tokens = request.num_prompt_tokens
        num_padding = -num_tokens % block_size
        first = num_tokens + num_padding
        longest = min(max_model_len, first + self.max_outputs)
        if first + len(self.decoder_start) >= longest:
            raise ContextExceeded.of_prompt(first + len(self.decoder_start), longest)
        padding = (self.pad_token_id,) * num_padding
        return replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *padding, *self.decoder_start),
            num_encoder_tokens=num_tokens,
            max_len=longest,
        )
