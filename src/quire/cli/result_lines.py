"""One result as plain data for JSON."""

from typing import Any

from quire.core.errors import QuireError
from quire.llm.outputs import CompletionOutput, Logprob, RequestOutput


def result_record(index: int, result: RequestOutput | QuireError) -> dict[str, Any]:
    """`index` is the prompt's place in the input. A prompt that was refused has `error` instead of `outputs`."""
    if isinstance(result, QuireError):
        return {"index": index, "error": str(result)}
    record: dict[str, Any] = {
        "index": index,
        "prompt": result.prompt,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
        "outputs": [_output(output) for output in result.outputs],
        "seconds_to_first_token": result.metrics.first_token,
        "seconds": result.metrics.total,
    }
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if position is None else _logprobs(position) for position in result.prompt_logprobs
        ]
    return record


def _output(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        record["cumulative_logprob"] = output.cumulative_logprob
        record["logprobs"] = [_logprobs(position) for position in output.logprobs]
    return record


def _logprobs(position: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "token": entry.decoded_token}
        for token_id, entry in position.items()
    }
