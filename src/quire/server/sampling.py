"""From a request's fields to SamplingParams, over what the model's makers recommend."""

from typing import Any

from quire.core.errors import InvalidRequest
from quire.core.sampling import BEAM_SAMPLING, SamplingParams
from quire.server.protocol.chat import ChatCompletionRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.sampling import SamplingFields
from quire.server.structured import structured_output

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat goes on for as long as the context allows
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "use_beam_search",
    "best_of",
    "length_penalty",
    "early_stopping",
)


def chat_sampling(body: ChatCompletionRequest, recommended: SamplingParams) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: set logprobs to true", "top_logprobs")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    _check_stream(body)
    given = _given(body) | {"max_tokens": limit}
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    sampling: SamplingParams = _named(body, _base(body, recommended).changed, given)
    _check_told_at_the_end(body, sampling)
    return sampling


def completion_sampling(body: CompletionRequest, recommended: SamplingParams) -> SamplingParams:
    _check_stream(body)
    limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and limit == 0:
        limit = 1  # the prompt alone is wanted; the engine makes one token that nobody sees
    given = _given(body) | {"max_tokens": limit}
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = body.logprobs
    sampling: SamplingParams = _named(body, _base(body, recommended).changed, given)
    _check_told_at_the_end(body, sampling)
    return sampling


def _base(body: SamplingFields, recommended: SamplingParams) -> SamplingParams:
    """Advice on drawing is not meant for beams."""
    return recommended.changed(**BEAM_SAMPLING) if body.use_beam_search else recommended


def _check_told_at_the_end(body: SamplingFields, sampling: SamplingParams) -> None:
    if not body.stream:
        return
    if sampling.use_beam_search:
        raise InvalidRequest(
            "beams are known at the end only, so partial ones cannot be streamed: set stream to false",
            "stream",
        )
    if sampling.num_sequences > sampling.n:
        raise InvalidRequest(
            f"best_of={sampling.best_of} can only be chosen from at the end: set stream to false", "best_of"
        )


def _given(body: SamplingFields) -> dict[str, Any]:
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    given["structured"] = structured_output(body)
    return given


def _named(body: SamplingFields, change: Any, given: dict[str, Any]) -> Any:
    """Errors name the fields as the caller spelled them."""
    try:
        return change(**given)
    except InvalidRequest as error:
        chat = isinstance(body, ChatCompletionRequest)
        if chat and error.param == "logprobs":
            raise InvalidRequest(str(error).replace("logprobs", "top_logprobs", 1), "top_logprobs") from None
        if chat and error.param == "max_tokens" and body.max_tokens is None:
            said = str(error).replace("max_tokens", "max_completion_tokens", 1)
            raise InvalidRequest(said, "max_completion_tokens") from None
        raise


def _check_stream(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: set stream to true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs come with a whole answer: set stream to false", "prompt_logprobs"
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise InvalidRequest(f"logit_bias has the key {key[:40]!r}: keys are token ids", "logit_bias")
    return int(key)
