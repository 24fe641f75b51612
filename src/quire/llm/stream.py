"""Streaming from an LLM in one thread: pieces of text as they are made, and many prompts that fail independently.

One iterator at a time: each steps the engine and takes only its own updates.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.core.errors import QueueFull, QuireError
from quire.core.sampling import SamplingParams
from quire.llm.llm import LLM
from quire.llm.outputs import RequestOutput, request_output
from quire.text.answer import Answer
from quire.text.prompts import PreparedPrompt, ready_to_sample

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step added to the first sequence's text; the last piece has the whole `output`."""

    text: str
    num_tokens: int  # of the answer so far
    output: RequestOutput | None = None


def stream(
    llm: LLM, prompt: PreparedPrompt, sampling: SamplingParams, stopped: Callable[[], bool] = lambda: False
) -> Iterator[TextDelta]:
    """Pieces of the answer to one prompt. `stopped` is asked between steps; if true the answer ends there.

    A caller that stops iterating aborts the request.
    """
    answer = _submit(llm, prompt, sampling)
    first = answer.sequences[0]
    try:
        while not answer.finished:
            if stopped():
                answer.end("abort")
                yield TextDelta(first.new_text, len(first.token_ids))
                break
            for _answer, update in llm.take_updates({answer.request_id: answer}):
                if update.index == 0 and first.new_text:
                    yield TextDelta(first.new_text, len(first.token_ids))
    finally:
        llm.engine.abort(answer.request_id)
    if answer.fault is not None:
        raise answer.fault
    yield TextDelta("", len(first.token_ids), _output(llm, answer, prompt))


def generate_each(
    llm: LLM,
    prompts: Sequence[PreparedPrompt],
    sampling: SamplingParams,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, RequestOutput | QuireError]]:
    """(index of the prompt, its result), in the order of finishing. An error of one prompt is its result.

    Prompts beyond the bounds of the queue are submitted as it empties. Ends when `stopped` is true.
    """
    waiting = deque(range(len(prompts)))
    answers: dict[str, Answer] = {}
    indices: dict[str, int] = {}
    try:
        while (waiting or answers) and not stopped():
            while waiting:
                try:
                    answer = _submit(llm, prompts[waiting[0]], sampling)
                except QueueFull:
                    break
                except QuireError as error:
                    yield waiting.popleft(), error
                else:
                    answers[answer.request_id] = answer
                    indices[answer.request_id] = waiting.popleft()
            for answer, _update in llm.take_updates(answers):
                if answer.finished and answers.pop(answer.request_id, None) is not None:
                    index = indices[answer.request_id]
                    yield index, answer.fault or _output(llm, answer, prompts[index])
    finally:
        for request_id in answers:
            llm.engine.abort(request_id)


def _submit(llm: LLM, prompt: PreparedPrompt, sampling: SamplingParams) -> Answer:
    sampling = ready_to_sample(sampling, llm.tokenizer)
    request_id = f"stream-{next(_ids)}"
    llm.engine.add(prompt.request(request_id, sampling))
    return Answer(request_id, sampling, llm.tokenizer)


def _output(llm: LLM, answer: Answer, prompt: PreparedPrompt) -> RequestOutput:
    return request_output(answer, prompt.text, prompt.token_ids, llm.tokenizer)
