"""POST /v1/chat/completions, and the path from a chat request to its reply that other endpoints take too."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.sampling import SamplingParams
from quire.server.chat_reply import ChatReply
from quire.server.errors import not_supported, renamed_errors
from quire.server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from quire.server.reply import ERRORS, JsonReply, answers
from quire.server.sampling import chat_sampling
from quire.server.service import ServedModel, Service
from quire.server.sse import EventStream
from quire.server.tools import ToolPlan, tool_plan
from quire.text.prompts import PreparedPrompt
from quire.text.reader import AnswerFormats, AnswerParsers


def chat_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", responses={**answers(ChatCompletion, ChatCompletionChunk), **ERRORS})
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation, whole or in pieces."""
        reply = await answer_chat(service, request, body)
        if body.stream:
            return EventStream(reply, reply.response_id)
        return JsonReply(await reply.whole())

    return router


async def answer_chat(service: Service, request: Request, body: ChatCompletionRequest) -> ChatReply:
    """Checks a chat request, makes its prompt and submits it; raises at once what refuses it.

    The reply must be used, as a whole or as a stream: its generation runs already.
    """
    model = service.model_named(body.model)
    _refuse_unsupported(body, service.settings.trust_request_chat_template)
    plan = tool_plan(body)
    sampling = chat_sampling(body, model.ready.default_sampling)
    formats = model.prompts.formats
    sampling = sampling.changed(structured=plan.form(sampling.structured, formats.tools))
    service.check_room()
    prompt = await chat_prompt(model, body, plan)
    kept_ids = formats.kept_ids(model.prompts.tokenizer, with_tools=bool(plan.shown))
    with renamed_errors({"prompt": "messages"}):
        response_id, generation = service.generate(request, body, [prompt], sampling, "chatcmpl", kept_ids)
    parsers = _answer_parsers(plan, formats, sampling, prompt.text)
    return ChatReply(
        response_id, body, body.model or model.names[0], generation, model.prompts.tokenizer, parsers
    )


async def chat_prompt(
    model: ServedModel, body: ChatCompletionRequest, plan: ToolPlan | None = None
) -> PreparedPrompt:
    """The prompt that a chat request makes."""
    return await model.prompts.chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template=body.chat_template,
        tools=(plan or tool_plan(body)).shown,
        variables={
            **({"documents": body.documents} if body.documents else {}),
            **(body.chat_template_kwargs or {}),
        },
    )


def _answer_parsers(
    plan: ToolPlan, formats: AnswerFormats, sampling: SamplingParams, prompt: str | None
) -> AnswerParsers:
    """JSON under a grammar is all content, or all calls. Text under another grammar has reasoning only if the grammar
    lets it write the opening marker."""
    form = sampling.structured
    if form is None:
        return AnswerParsers(formats.reasoning, prompt, plan.parser_maker(formats.tools), plan.max_calls)
    if form.kind in ("json_schema", "json_object"):
        return AnswerParsers(make_tool_parser=plan.parser_maker(None), max_calls=plan.max_calls)
    reasoning = "qwen3" if formats.reasoning else None
    return AnswerParsers(reasoning, None, plan.parser_maker(formats.tools), plan.max_calls)


def _refuse_unsupported(body: ChatCompletionRequest, trust_template: bool) -> None:
    """Fields that would change the answer and are not served are refused by name, never dropped silently."""
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) is not None:
            raise not_supported(name, f"{name} was OpenAI's old name: send {instead}")
    if body.chat_template is not None and not trust_template:
        raise not_supported(
            "chat_template",
            "a request's own chat template is not accepted: start the server with --trust-request-chat-template",
        )
