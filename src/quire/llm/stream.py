"""Streaming from an LLM in one thread: pieces of text as they are made, and many prompts with separate fates.

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
class Piece:
    """What one step added to the first sequence's text; the last piece has the whole `output`."""

    text: str
    num_tokens: int  # of the answer so far
    output: RequestOutput | None = None


def stream(
    llm: LLM, prompt: PreparedPrompt, sampling: SamplingParams, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Piece]:
    """Pieces of the answer to one prompt. `stopped` is asked between steps; if true the answer ends there.

    Whoever stops iterating ends the request as well: nothing is left running.
    """
    running = _start(llm, prompt, sampling)
    answer = running.answer
    try:
        while not answer.finished:
            if stopped():
                answer.end("abort")
                yield Piece(answer.sequences[0].new_text, len(answer.sequences[0].token_ids))
                break
            for update in llm.engine.step():
                if update.request_id != answer.request_id:
                    continue
                if answer.take(update):
                    llm.engine.stop(update.request_id, update.index)
                if update.index == 0 and answer.sequences[0].new_text:
                    yield Piece(answer.sequences[0].new_text, len(answer.sequences[0].token_ids))
    finally:
        _leave(llm, [running])
    if answer.fault is not None:
        raise answer.fault
    yield Piece("", len(answer.sequences[0].token_ids), running.output(llm))


def generate_each(
    llm: LLM,
    prompts: Sequence[PreparedPrompt],
    sampling: SamplingParams,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, RequestOutput | QuireError]]:
    """(which prompt, its result), in the order of finishing. A prompt that cannot be served is its own affair.

    More prompts than the queue takes are handed over as it empties. When `stopped` says so, nothing more comes.
    """
    waiting = deque(enumerate(prompts))
    running: dict[str, _Running] = {}
    try:
        while (waiting or running) and not stopped():
            yield from _submit(llm, waiting, running, sampling)
            for update in llm.engine.step():
                one = running.get(update.request_id)
                if one is None:
                    continue
                if one.answer.take(update):
                    llm.engine.stop(update.request_id, update.index)
                if one.answer.finished:
                    del running[update.request_id]
                    yield one.index, one.answer.fault or one.output(llm)
    finally:
        _leave(llm, list(running.values()))


@dataclass(frozen=True, slots=True)
class _Running:
    index: int
    prompt: PreparedPrompt
    answer: Answer

    def output(self, llm: LLM) -> RequestOutput:
        return request_output(self.answer, self.prompt.text, self.prompt.token_ids, llm.tokenizer)


def _submit(
    llm: LLM,
    waiting: "deque[tuple[int, PreparedPrompt]]",
    running: dict[str, _Running],
    sampling: SamplingParams,
) -> Iterator[tuple[int, QuireError]]:
    while waiting:
        index, prompt = waiting[0]
        try:
            started = _start(llm, prompt, sampling, index)
        except QueueFull:
            return
        except QuireError as error:
            waiting.popleft()
            yield index, error
        else:
            waiting.popleft()
            running[started.answer.request_id] = started


def _start(llm: LLM, prompt: PreparedPrompt, sampling: SamplingParams, index: int = 0) -> _Running:
    sampling = ready_to_sample(sampling, llm.tokenizer)
    request_id = f"stream-{next(_ids)}"
    llm.engine.add(request_id, prompt.token_ids, sampling, **prompt.options)
    return _Running(index, prompt, Answer(request_id, sampling, llm.tokenizer))


def _leave(llm: LLM, running: list[_Running]) -> None:
    """Ends what is unfinished; ending what is finished changes nothing."""
    for one in running:
        llm.engine.abort(one.answer.request_id)
