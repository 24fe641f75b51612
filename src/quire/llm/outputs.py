"""What `generate` returns, spelled as vLLM's users know it."""

from dataclasses import dataclass, field

from quire.core.step import TokenLogprobs
from quire.text.answer import Answer
from quire.text.prompts import PreparedPrompt
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1 is the most likely token
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence. `cumulative_logprob` and `logprobs` are there if logprobs were asked for."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop string or token id that ended it


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds. `first_token` and `total` count from the request's arrival."""

    first_token: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


def request_output(answer: Answer, prompt: PreparedPrompt, tokenizer: Tokenizer | None) -> RequestOutput:
    """The answer as it stands now."""
    has_logprobs = answer.sampling.logprobs is not None
    outputs = [
        CompletionOutput(
            index=index,
            text=sequence.text,
            token_ids=list(sequence.token_ids),
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=[_position(entry, tokenizer) for entry in sequence.logprobs] if has_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        for index, sequence in enumerate(answer.best)
    ]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    if answer.prompt_logprobs is not None:  # nothing predicts the first token
        prompt_logprobs = [None, *(_position(entry, tokenizer) for entry in answer.prompt_logprobs)]
    return RequestOutput(
        request_id=answer.request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=outputs,
        prompt_logprobs=prompt_logprobs,
        finished=answer.finished,
        num_cached_tokens=answer.num_cached,
        metrics=RequestMetrics(
            first_token=answer.first_token - answer.arrival if answer.first_token else None,
            total=answer.last_token - answer.arrival if answer.last_token else None,
        ),
    )


def _position(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    def named(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_text(token_id) if tokenizer else None)

    best = {
        token_id: named(token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    }
    best[entry.token_id] = named(entry.token_id, entry.logprob, entry.rank)
    return best
