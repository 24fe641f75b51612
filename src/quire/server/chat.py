"""POST /v1/chat/completions."""

import time
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire import __version__
from quire.server.documents import ERRORS, answers
from quire.server.errors import ApiError
from quire.server.generation import Change, Generation
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.protocol.chat import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from quire.server.reply import DONE, Events, JsonReply, event, streamed
from quire.server.sampling import chat_sampling
from quire.server.service import Service
from quire.server.unsupported import refuse_unsupported_chat
from quire.text.tokenizer import Tokenizer

FINGERPRINT = f"quire-{__version__}"


def chat_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", responses={**answers(ChatCompletion, ChatCompletionChunk), **ERRORS})
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation, whole or in pieces."""
        model = service.model_named(body.model)
        refuse_unsupported_chat(body, service.settings.trust_request_chat_template)
        sampling = chat_sampling(body, model.ready.default_sampling)
        service.check_room()
        prompt = await model.prompts.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            template=body.chat_template,
            variables={
                **({"documents": body.documents} if body.documents else {}),
                **(body.chat_template_kwargs or {}),
            },
        )
        try:
            response_id, generation = service.generate(request, body, [prompt], sampling, "chatcmpl")
        except ApiError as error:
            error.param = "messages" if error.param == "prompt" else error.param
            raise
        reply = ChatReply(
            response_id, body, body.model or model.names[0], generation, model.prompts.tokenizer
        )
        if body.stream:
            return await streamed(reply.events(), response_id)
        await generation.finish()
        return JsonReply(reply.whole())

    return router


class ChatReply:
    """The answers of a generation in OpenAI's shape."""

    def __init__(
        self,
        response_id: str,
        body: ChatCompletionRequest,
        model: str,
        generation: Generation,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._body = body
        self._generation = generation
        self._tokenizer = tokenizer
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": response_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self) -> ChatCompletion:
        answer = self._generation.answers[0]
        choices: list[ChatChoice] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": sequence.text, "refusal": None},
                "logprobs": chat_logprobs(sequence.logprobs, self._tokenizer)
                if self._body.logprobs
                else None,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
            }
            for index, sequence in enumerate(answer.best)
        ]
        whole: ChatCompletion = {
            **self._head,  # type: ignore[typeddict-item]
            "object": "chat.completion",
            "choices": choices,
            "usage": self._generation.usage(),
        }
        if answer.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self._tokenizer)
        return whole

    async def events(self) -> Events:
        """Server-sent events: a role for each choice, text as it comes, usage if asked for, and the end."""
        begun = False
        async with aclosing(self._generation.changes()) as changes:
            async for batch in changes:
                pieces = []
                if not begun:
                    begun = True
                    num_choices = len(self._generation.answers[0].sequences)
                    pieces += [self._role(index) for index in range(num_choices)]
                pieces += [self._piece(change) for change in batch]
                if shown := b"".join(pieces):
                    yield shown
        if self._with_usage:
            yield self._event([], usage=True)
        yield DONE

    def _role(self, index: int) -> bytes:
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def _piece(self, change: Change) -> bytes:
        """Nothing, where a step added nothing that can be shown yet."""
        sequence = change.sequence
        added = sequence.logprobs[change.first_token :] if self._body.logprobs else []
        ended = sequence.finish_reason is not None
        if not (change.text or added or ended):
            return b""
        delta: ChatDelta = {"content": change.text} if change.text or not ended else {}
        logprobs = chat_logprobs(added, self._tokenizer) if added else None
        return self._choice(
            sequence.index, delta, logprobs, sequence.finish_reason, stop_reason=sequence.stop_reason
        )

    def _choice(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None,
        finish_reason: str | None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._event([choice])

    def _event(self, choices: list[dict[str, object]], usage: bool = False) -> bytes:
        chunk: dict[str, object] = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._with_usage:
            chunk["usage"] = self._generation.usage() if usage else None
        return event(chunk)
