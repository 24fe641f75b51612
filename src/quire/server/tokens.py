"""POST /tokenize and /detokenize."""

from fastapi import APIRouter
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.documents import ERRORS, answers
from quire.server.logprobs import token_text
from quire.server.prompts import PromptMaker
from quire.server.protocol.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from quire.server.reply import JsonReply
from quire.server.service import Service
from quire.server.tools import checked_tools
from quire.text.prompts import PreparedPrompt


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", responses={**answers(Tokenized), **ERRORS})
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of messages in the chat template."""
        model = service.model_named(body.model)
        token_ids = (await _prompt(body, model.prompts)).token_ids
        found: Tokenized = {
            "count": len(token_ids),
            "max_model_len": model.ready.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            found["token_strs"] = [token_text(one, model.prompts.tokenizer) for one in token_ids]
        return JsonReply(found)

    @router.post("/detokenize", responses={**answers(Detokenized), **ERRORS})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = service.model_named(body.model)
        tokenizer, limit = model.prompts.tokenizer, model.ready.vocab_size
        if tokenizer is None:
            raise InvalidRequest("this model has no tokenizer", "tokens")
        wrong = next((one for one in body.tokens if not 0 <= one < limit), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {limit}", "tokens")
        text: Detokenized = {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}
        return JsonReply(text)

    return router


async def _prompt(body: TokenizeRequest, prompts: PromptMaker) -> PreparedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    if body.messages is not None:
        return await prompts.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            tools=checked_tools(body.tools),
            variables=body.chat_template_kwargs,
        )
    assert body.prompt is not None
    return (await prompts.completions(body.prompt, body.add_special_tokens))[0]
