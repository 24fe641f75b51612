"""POST /v1/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.core.step import TokenLogprobs
from quire.server.errors import ApiError
from quire.server.generation import Change, Generation
from quire.server.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from quire.server.protocol.base import Usage
from quire.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from quire.server.reply import (
    DONE,
    EventStream,
    JsonReply,
    TextEvent,
    answer_head,
    answers,
    event,
    last_error,
)
from quire.server.sampling import completion_sampling, greedy_copies, with_served_form
from quire.server.service import Service
from quire.text.answer import Answer, AnswerSequence
from quire.text.prompts import PreparedPrompt, as_list
from quire.text.tokenizer import Tokenizer


def completions_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions", responses=answers(Completion, Completion))
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues one prompt or several, whole or in pieces."""
        model = service.model_named(body.model)
        if body.echo and model.ready.limits.encoder is not None:
            raise InvalidRequest(
                "echo is not available from an encoder-decoder model, whose answers do not continue the prompt: "
                "leave it out",
                "echo",
            )
        body, copies = greedy_copies(body, model.ready)
        sampling = with_served_form(request, completion_sampling(body, model.ready.default_sampling))
        service.check_room(num_prompts=len(as_list(body.prompt)), sampling=sampling)
        must_fit = body.truncate_prompt_tokens is None
        if body.suffix:
            prompts = await model.prompts.infilled(
                body.prompt, body.suffix, body.add_special_tokens, must_fit
            )
            ends = model.prompts.infill.end_ids if model.prompts.infill is not None else ()
            sampling = sampling.changed(stop_token_ids=(*sampling.stop_token_ids, *ends))
        else:
            prompts = await model.prompts.completions(body.prompt, body.add_special_tokens, must_fit)
        sampling = await model.prompts.ready_to_sample(sampling)
        response_id, generation = service.generate(request, body, prompts, sampling, "cmpl")
        name, tokenizer = service.answer_name(body.model), model.prompts.tokenizer
        reply = CompletionReply(response_id, body, name, generation, tokenizer, copies)
        if body.stream:
            return EventStream(reply, response_id)
        await generation.finish()
        return JsonReply(reply.whole())

    return router


class CompletionReply:
    """The answers of a generation in OpenAI's shape; choice `i` of prompt `p` has index p * n + i."""

    def __init__(
        self,
        response_id: str,
        body: CompletionRequest,
        model: str,
        generation: Generation,
        tokenizer: Tokenizer | None,
        copies: int = 1,
    ) -> None:
        """With `copies` of the one answer of each prompt, each a choice."""
        self._copies = copies
        self._body = body
        self.generation = generation
        self._tokenizer = tokenizer
        self._num_choices = copies * (body.n or 1)
        self._only_prompt = bool(body.echo) and body.max_tokens == 0
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._counts_always = bool(options and options.include_usage and options.continuous_usage_stats)
        self._begun: set[int] = set()  # choices that have sent something
        self._places: dict[int, TextOffsets] = {}  # by choice, where logprobs are wanted
        # Events of plain text, by choice, once the first is out; None where text comes with logprobs or counts, or not
        # at all.
        is_plain = body.logprobs is None and not self._only_prompt and not self._counts_always
        self._texts: dict[int, TextEvent] | None = {} if is_plain else None
        self._head = answer_head(response_id, "text_completion", model)

    def whole(self) -> Completion:
        choices = []
        for position, answer in enumerate(self.generation.answers):
            for index, sequence in enumerate(list(answer.best) * self._copies):
                choice = self._choice(position, index, answer, sequence, sequence.text, 0, first=True)
                if answer.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self._tokenizer)
                choices.append(choice)
        return {**self._head, "choices": choices, "usage": self._usage()}

    def take(self) -> bytes:
        """Text as it comes, in server-sent events. Plain text is filled into an event that was encoded before."""
        changes = self.generation.take()
        return (
            self._pieces(changes[0])
            if len(changes) == 1
            else b"".join([self._pieces(one) for one in changes])
        )

    def end(self) -> bytes:
        """Usage if asked for, and the end."""
        return self._event([], usage=self._usage()) + DONE if self._with_usage else DONE

    def fail(self, error: ApiError) -> bytes:
        return last_error(error)

    def _pieces(self, change: Change) -> bytes:
        first = change.sequence.index
        if self._copies == 1:
            return self._piece(change, first)
        return b"".join([self._piece(change, index) for index in range(first, first + self._copies)])

    def _piece(self, change: Change, index: int) -> bytes:
        """Empty where a step added nothing that can be shown yet. The finish reason comes behind the last text."""
        sequence = change.sequence
        number = self._index(change.position, index)
        ended = sequence.finish_reason is not None
        if self._texts and change.text and not ended and number in self._texts:
            return self._texts[number].encode(change.text)
        answer = self.generation.answers[change.position]
        first = number not in self._begun
        wants_logprobs = self._body.logprobs is not None and len(sequence.token_ids) > change.first_token
        shows_prompt = first and bool(self._body.echo)
        data = b""
        if change.text or wants_logprobs or shows_prompt:
            choice = self._choice(
                change.position, index, answer, sequence, change.text, change.first_token, first=first
            )
            choice["finish_reason"] = choice["stop_reason"] = None
            if self._texts is not None and not ended:
                empty: CompletionChoice = {**choice, "text": ""}
                self._texts[number] = TextEvent(self._payload([empty], None), "text")
            data = self._event([choice])
        if not ended:
            return data
        none: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": None,
            "text_offset": [],
        }
        end: CompletionChoice = {
            "index": number,
            "text": "",
            "logprobs": none if self._body.logprobs is not None else None,  # clients join those of all chunks
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        return data + self._event([end])

    def _choice(
        self,
        position: int,
        index: int,
        answer: Answer,
        sequence: AnswerSequence,
        text: str,
        first_token: int,
        *,
        first: bool,
    ) -> CompletionChoice:
        number = self._index(position, index)
        text = "" if self._only_prompt else text
        if first and self._body.echo:
            text = self._prompt_text(self.generation.prompts[position]) + text
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(position, number, answer, sequence, first_token, first)
        self._begun.add(number)
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }

    def _logprobs(
        self,
        position: int,
        number: int,
        answer: Answer,
        sequence: AnswerSequence,
        first_token: int,
        first: bool,
    ) -> CompletionLogprobs:
        entries: list[TokenLogprobs | int] = []
        prompt = self.generation.prompts[position]
        if first:
            context_id = None if self._body.echo else prompt.context_id(self._tokenizer)
            skips = answer.sampling.skip_special_tokens
            skips = skips and not (self._body.echo and prompt.text is None)  # as _prompt_text shows token ids
            self._places[number] = TextOffsets(self._tokenizer, skips, context_id)
        if first and self._body.echo:
            entries.append(prompt.token_ids[0])
            entries += answer.prompt_logprobs or ()
        if not self._only_prompt:
            entries += sequence.logprobs[first_token:]
        return completion_logprobs(entries, self._tokenizer, self._places[number])

    def _prompt_text(self, prompt: PreparedPrompt) -> str:
        if prompt.text is not None or self._tokenizer is None:
            return prompt.text or ""
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _index(self, position: int, index: int) -> int:
        return position * self._num_choices + index

    def _usage(self) -> Usage:
        usage = self.generation.usage()
        if self._only_prompt:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return event(self._payload(choices, usage))

    def _payload(self, choices: list[CompletionChoice], usage: Usage | None) -> dict[str, object]:
        chunk: dict[str, object] = {**self._head, "choices": choices}
        if self._with_usage:
            chunk["usage"] = self._usage() if self._counts_always else usage
        return chunk
