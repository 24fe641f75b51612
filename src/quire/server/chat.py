"""POST /v1/chat/completions: the path from a chat request to its reply, which other endpoints take too."""

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.core.sampling import SamplingParams
from quire.server.access import add_warning, warn_without_effect
from quire.server.errors import ApiError, not_supported
from quire.server.generation import Change, Generation
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.protocol.base import InputTokens, Usage
from quire.server.protocol.completions import (
    CHAT_WITHOUT_EFFECT,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCallDelta,
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
from quire.server.retrieval import has_file_search
from quire.server.sampling import chat_sampling, greedy_copies, with_served_form
from quire.server.served_models import ServedModel
from quire.server.service import Service
from quire.server.stored_chats import create_stored_chat
from quire.server.tools import (
    FUNCTION_NAMES,
    ToolPlan,
    function_delta,
    function_message,
    function_reason,
    tool_plan,
    with_tools,
)
from quire.text.answer import AnswerSequence
from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece, Reasoning
from quire.text.prompts import PreparedPrompt
from quire.text.reader import AnswerFormats, AnswerParsers, AnswerReader
from quire.text.tokenizer import Tokenizer


def chat_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", responses=answers(ChatCompletion, ChatCompletionChunk))
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation, whole or in pieces."""
        warn_without_effect(request, body, CHAT_WITHOUT_EFFECT)
        if body.modalities is not None and body.modalities != ["text"]:
            _check_modalities(request, body.modalities)
        answer = answer_chat
        if body.tools and has_file_search(body.tools):
            answer = (await service.retrieval.opened()).file_search.answer_chat
        if body.store:
            return await create_stored_chat(service, request, body, answer)
        reply = await answer(service, request, body)
        if body.stream:
            return EventStream(reply, reply.response_id)
        return JsonReply(await reply.whole())

    @router.post("/v1/chat/completions/input_tokens", responses=answers(InputTokens))
    async def count_input_tokens(body: ChatCompletionRequest) -> Response:
        """How many tokens a chat's prompt would have."""
        _refuse_unsupported(body, service.settings.trust_request_chat_template)
        prompt = await chat_prompt(service.model_named(body.model), body, chat_tools(body))
        count: InputTokens = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        return JsonReply(count)

    return router


async def answer_chat(service: Service, request: Request, body: ChatCompletionRequest) -> "ChatReply":
    """Checks a chat request, makes its prompt and submits it; raises at once what refuses it.

    The reply must be used, as a whole or as a stream: its generation runs already.
    """
    model = service.model_named(body.model)
    _refuse_unsupported(body, service.settings.trust_request_chat_template)
    body, copies = greedy_copies(body, model.ready)
    if _has_functions(body):
        body = with_tools(body)
    plan = chat_tools(body)
    sampling = with_served_form(request, chat_sampling(body, model.ready.default_sampling))
    formats = model.prompts.formats
    if plan is not None:
        for warning in plan.warnings:
            add_warning(request, warning)
        sampling = sampling.changed(structured=plan.form(sampling.structured, formats.tools))
    service.check_room(sampling=sampling)
    prompt = await chat_prompt(model, body, plan, must_fit=body.truncate_prompt_tokens is None)
    sampling = await model.prompts.ready_to_sample(sampling)
    kept_ids: frozenset[int] = frozenset()
    has_tools = plan is not None and bool(plan.shown)
    if has_tools or formats.reasoning is not None:
        kept_ids = formats.kept_ids(model.prompts.tokenizer, with_tools=has_tools)
    try:
        response_id, generation = service.generate(request, body, [prompt], sampling, "chatcmpl", kept_ids)
    except (InvalidRequest, ApiError) as error:
        raise error.renamed({"prompt": "messages"}) from None
    parsers = _answer_parsers(plan, formats, sampling, prompt.text)
    name, tokenizer = service.answer_name(body.model), model.prompts.tokenizer
    return ChatReply(response_id, body, name, generation, tokenizer, parsers, copies)


def chat_tools(body: ChatCompletionRequest) -> ToolPlan | None:
    """None: the request has no tools."""
    if not body.tools and body.tool_choice is None:
        return None
    try:
        return tool_plan(body)
    except InvalidRequest as error:
        older = body.functions is not None or body.function_call is not None
        raise error.renamed(FUNCTION_NAMES) if older else error from None


def _has_functions(body: ChatCompletionRequest) -> bool:
    """Whether the request has OpenAI's older names for tools, in its fields or messages."""
    return (
        body.functions is not None
        or body.function_call is not None
        or any(message.get("role") == "function" or "function_call" in message for message in body.messages)
    )


async def chat_prompt(
    model: ServedModel, body: ChatCompletionRequest, plan: ToolPlan | None, must_fit: bool = False
) -> PreparedPrompt:
    """The prompt that a chat request makes."""
    return await model.prompts.chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template=body.chat_template,
        tools=plan.shown if plan is not None else (),
        variables={
            **({"documents": body.documents} if body.documents else {}),
            **effort_variables(body.reasoning_effort),
            **(body.chat_template_kwargs or {}),
        },
        must_fit=must_fit,
    )


def _answer_parsers(
    plan: ToolPlan | None, formats: AnswerFormats, sampling: SamplingParams, prompt: str | None
) -> AnswerParsers | None:
    """None: all text is content. JSON under a grammar is all content, or all calls. Text under another grammar has
    reasoning only if the grammar lets it write the opening marker."""
    form, reasoning, tools = sampling.structured, formats.reasoning, formats.tools
    if form is not None:
        is_json = form.kind in ("json_schema", "json_object")
        reasoning = "qwen3" if formats.reasoning and not is_json else None
        tools = None if is_json else formats.tools
        prompt = None
    make_tool_parser = plan.parser_maker(tools) if plan is not None else None
    if reasoning is None and make_tool_parser is None:
        return None
    max_calls = plan.max_calls if plan is not None else None
    is_forced = plan is not None and plan.forced is not None
    return AnswerParsers(reasoning, prompt, make_tool_parser, max_calls, drops_repeats=is_forced)


def _refuse_unsupported(body: ChatCompletionRequest, trust_template: bool) -> None:
    """Fields that would change the answer and are not served are refused by name, never dropped silently."""
    if body.chat_template is not None and not trust_template:
        raise not_supported(
            "chat_template",
            "a request's own chat template is not accepted: start the server with --trust-request-chat-template",
        )


def _check_modalities(request: Request, modalities: Sequence[str]) -> None:
    if "text" not in modalities:
        raise not_supported("modalities", f"modalities={modalities!r}: answers are text: give ['text']")
    add_warning(request, "modalities has no effect: answers are text")


def effort_variables(effort: str | None) -> dict[str, Any]:
    """The names by which templates know how hard to think; others ignore them."""
    if effort == "none":
        return {"enable_thinking": False}
    return {} if effort is None else {"reasoning_effort": effort}


# ---------------------------------------------------------------------- replies


class ChatReply:
    """Used once: either for `whole`, or for a stream of `take_chunks` and `last_chunks`."""

    def __init__(
        self,
        response_id: str,
        body: ChatCompletionRequest,
        model: str,
        generation: Generation,
        tokenizer: Tokenizer | None,
        parsers: AnswerParsers | None,
        copies: int = 1,
    ) -> None:
        """With `copies` of its one answer, each a choice."""
        self._copies = copies
        self.response_id = response_id
        self.model = model
        self._head = answer_head(response_id, "chat.completion", model)
        self._body = body
        self._has_functions = body.functions is not None  # an answer then has a function_call
        self.generation = generation
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._readers: dict[int, AnswerReader] = {}  # of streamed answers that are not plain text
        if parsers is not None and parsers.drops_repeats:
            generation.stops = RepeatStop(parsers)
        self.annotate: Callable[[str], list[dict[str, Any]]] | None = None  # of an answer from files
        self._begun = False
        self._num_choices = len(generation.answers[0].sequences) * copies
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._counts_always = bool(options and options.include_usage and options.continuous_usage_stats)
        # of each choice, where all text is content; empty where it must be parsed or copied, or has logprobs or counts
        self._contents: list[TextEvent] = []
        if body.stream and parsers is None and not body.logprobs and not self._counts_always and copies == 1:
            self._contents = [
                TextEvent(self._choice(index, {"content": ""}), "content")
                for index in range(self._num_choices)
            ]

    def usage(self) -> Usage:
        """Token counts so far."""
        usage = self.generation.usage()
        if self._parsers is not None and self._parsers.reasoning is not None:
            counts = [
                self._parsers.num_reasoning_tokens(sequence, self._tokenizer)
                for sequence in self.generation.answers[0].sequences
            ]
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
        return usage

    async def whole(self) -> ChatCompletion:
        """The answer, when its last token has come."""
        await self.generation.finish()
        return self.completion()

    def completion(self) -> ChatCompletion:
        """The answer of a generation that has ended."""
        answer = self.generation.answers[0]
        best = list(answer.best) * self._copies
        choices = [self._whole_choice(index, sequence) for index, sequence in enumerate(best)]
        whole: ChatCompletion = {**self._head, "choices": choices, "usage": self.usage()}
        if answer.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self._tokenizer)
        return whole

    def take_chunks(self) -> list[ChatCompletionChunk]:
        """The chunks for updates since the last call: first a role for each choice, then deltas."""
        return self._chunks(self.generation.take())

    def last_chunks(self) -> list[ChatCompletionChunk]:
        """After the deltas: usage, if it was asked for."""
        if not self._with_usage:
            return []
        last = self._chunk([])
        last["usage"] = self.usage()
        return [last]

    def take(self) -> bytes:
        """As `take_chunks`, in server-sent events."""
        changes = self.generation.take()
        if not self._begun:
            return b"".join([event(chunk) for chunk in self._chunks(changes)])
        return (
            self._event(changes[0]) if len(changes) == 1 else b"".join([self._event(one) for one in changes])
        )

    def end(self) -> bytes:
        return b"".join([*map(event, self.last_chunks()), DONE])

    def fail(self, error: ApiError) -> bytes:
        return last_error(error)

    def _event(self, change: Change) -> bytes:
        """Plain content is filled into an event that was encoded once; everything else is built as chunks."""
        if self._contents and change.text and change.sequence.finish_reason is None:
            return self._contents[change.sequence.index].encode(change.text)
        return b"".join([event(chunk) for chunk in self._deltas(change)])

    def _chunks(self, changes: Iterable[Change]) -> list[ChatCompletionChunk]:
        chunks: list[ChatCompletionChunk] = []
        if not self._begun:
            role: ChatDelta = {"role": "assistant", "content": ""}
            chunks = [self._choice(index, role) for index in range(self._num_choices)]
        self._begun = True
        for change in changes:
            chunks += self._deltas(change)
        return chunks

    def _copied(self, chunks: list[ChatCompletionChunk]) -> list[ChatCompletionChunk]:
        """The chunks of a choice for each copy of it."""
        return [
            {**chunk, "choices": [{**chunk["choices"][0], "index": index}]}
            for index in range(self._copies)
            for chunk in chunks
        ]

    def _whole_choice(self, index: int, sequence: AnswerSequence) -> ChatChoice:
        reader = self._reader()
        message = read_message(reader, sequence.text)
        reason = _finish_reason(sequence, reader)
        if self.annotate is not None:
            message["annotations"] = self.annotate(message["content"] or "")
        if self._has_functions:
            message, reason = function_message(message), function_reason(reason)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(sequence, 0) if self._body.logprobs else None,
            "finish_reason": reason,
            "stop_reason": sequence.stop_reason,
        }

    def _logprobs(self, sequence: AnswerSequence, first_token: int) -> ChatLogprobs:
        at_start = first_token == 0 and sequence.begins_text
        return chat_logprobs(sequence.logprobs[first_token:], self._tokenizer, at_start)

    def _deltas(self, change: Change) -> list[ChatCompletionChunk]:
        """None where a step added nothing that can be shown yet."""
        sequence = change.sequence
        added = sequence.logprobs[change.first_token :] if self._body.logprobs else []
        reason = sequence.finish_reason
        if not (change.text or added or reason):
            return []
        added_deltas: list[ChatDelta]
        if self._parsers is None:
            added_deltas = [{"content": change.text}] if change.text else []
        else:
            reader = self._readers.get(sequence.index)
            if reader is None:
                reader = self._readers[sequence.index] = self._parsers.reader()
            pieces = reader.feed(change.text)
            if reason is not None:
                pieces += reader.finish()
                reason = _finish_reason(sequence, reader)
            added_deltas = deltas(pieces)
            if self._has_functions:
                added_deltas, reason = (
                    [function_delta(delta) for delta in added_deltas],
                    function_reason(reason),
                )
        if added and not added_deltas:
            added_deltas = [{"content": ""}]
        chunks = [self._choice(sequence.index, delta) for delta in added_deltas]
        if added:
            chunks[-1]["choices"][0]["logprobs"] = self._logprobs(sequence, change.first_token)
        if reason is not None and self.annotate is not None:
            text = read_message(self._reader(), sequence.text)["content"] or ""
            chunks.append(self._choice(sequence.index, {"annotations": self.annotate(text)}))
        if reason is not None:  # behind the last text, as in OpenAI's streams
            chunks.append(self._choice(sequence.index, {}, reason, sequence.stop_reason))
        return chunks if self._copies == 1 else self._copied(chunks)

    def _reader(self) -> AnswerReader:
        return self._parsers.reader() if self._parsers is not None else AnswerReader()

    def _choice(
        self,
        index: int,
        delta: ChatDelta,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> ChatCompletionChunk:
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._chunk([choice])

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._with_usage:
            chunk["usage"] = self.usage() if self._counts_always else None
        return chunk


class RepeatStop:
    """Ends a sequence whose calls have begun to repeat: nothing of what follows would be shown."""

    def __init__(self, parsers: AnswerParsers) -> None:
        self._parsers = parsers
        self._readers: dict[int, AnswerReader] = {}

    def __call__(self, sequence: AnswerSequence) -> bool:
        reader = self._readers.get(sequence.index)
        if reader is None:
            reader = self._readers[sequence.index] = self._parsers.reader()
        reader.feed(sequence.new_text)
        return reader.has_repeats


def read_message(reader: AnswerReader, text: str) -> ChatMessage:
    """A whole answer."""
    read = reader.whole(text)
    content = None if read.calls and not read.content else read.content
    message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if read.reasoning:
        message["reasoning_content"] = read.reasoning
    if read.calls:
        message["tool_calls"] = [
            {
                "id": _call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in read.calls
        ]
    return message


def deltas(pieces: Sequence[Piece]) -> list[ChatDelta]:
    """The fewest deltas that keep the pieces' order: within a delta, reasoning precedes content and content calls."""
    made: list[ChatDelta] = []
    for piece in pieces:
        match piece:
            case Reasoning():
                delta = _last(made, ("content", "tool_calls"))
                delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
            case Content():
                delta = _last(made, ("tool_calls",))
                delta["content"] = delta.get("content", "") + piece.text
            case CallBegin():
                begun: ToolCallDelta = {
                    "index": piece.index,
                    "id": _call_id(),
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
                _last(made).setdefault("tool_calls", []).append(begun)
            case Arguments():
                calls = _last(made).setdefault("tool_calls", [])
                if not calls or calls[-1]["index"] != piece.index:
                    calls.append({"index": piece.index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.text
            case CallEnd():
                pass
    return made


def _last(made: list[ChatDelta], later: tuple[str, ...] = ()) -> ChatDelta:
    """The delta to add to: a new one, if the last has what comes after."""
    if not made or any(key in made[-1] for key in later):
        made.append({})
    return made[-1]


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _finish_reason(sequence: AnswerSequence, reader: AnswerReader) -> str | None:
    """An answer that stopped by itself behind good calls waits for their results."""
    return "tool_calls" if sequence.finish_reason == "stop" and reader.has_calls else sequence.finish_reason
