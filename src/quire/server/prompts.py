"""Prompts: from text, messages or token ids to what the engine takes. Long ones are made in a thread."""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.sampling import SamplingParams
from quire.link.messages import Ready
from quire.server.request_templates import Rendering, RequestTemplates
from quire.text.infill import Infill
from quire.text.prompts import PreparedPrompt, as_list, check_fits, prepare, ready_to_sample
from quire.text.reader import choose_formats
from quire.text.template import ChatTemplate, template_from
from quire.text.tokenizer import LONG, Tokenizer, special_tokens
from quire.text.tool_formats import described

MAX_MESSAGES = 16_384  # of one conversation
VERY_LONG = 1 << 18  # characters; such texts are tokenized one at a time
MAX_CHARACTERS = 4 << 20  # of a text that is tokenized although it may be longer than the context
MAX_WAITING = 32  # requests with a very long text; more are refused at once
T = TypeVar("T")


class TextThreads:
    """Work on texts: short ones at once, longer ones in threads, very long ones one after another."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def run(self, make: Callable[[], T], num_characters: int) -> T:
        """The result of `make`. Raises QueueFull if too many very long texts wait."""
        if num_characters < LONG:
            return make()
        if num_characters < VERY_LONG:
            return await asyncio.to_thread(make)
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} very long texts are waiting to be tokenized: try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(make)
        finally:
            self._num_waiting -= 1


def is_larger(values: list[Any], limit: int) -> bool:
    """Whether these JSON values have more than `limit` characters and entries; counts no further. Empties the list."""
    size = 0
    while values and size <= limit:
        value = values.pop()
        size += len(value) if isinstance(value, Sized) else 1
        if isinstance(value, Mapping):
            values += (*value, *value.values())
        elif isinstance(value, list):
            values += value
    return size > limit


def check_characters(text: Any, limit: int, param: str) -> None:
    """Raises InvalidRequest for a text that is too long to be tokenized and then cut or counted."""
    if isinstance(text, str) and len(text) > limit:
        raise InvalidRequest(
            "{param} has {length} characters and at most {limit} are tokenized: shorten it, or send it in parts",
            param,
            length=len(text),
            limit=limit,
        )


class PromptMaker:
    def __init__(
        self,
        ready: Ready,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        described = ready.described
        self.max_model_len = ready.max_model_len
        self._may_go_on = ready.limits.encoder is None  # answers may continue the prompt's text
        self.tokenizer: Tokenizer | None = None
        if described.tokenizer_json is not None:
            self.tokenizer = Tokenizer(described.tokenizer_json, described.tokenizer_config)
        self._special = special_tokens(described.template_config)
        self._sent = RequestTemplates()
        self._threads = TextThreads()
        self._template: ChatTemplate | InvalidRequest
        try:
            self._template = template_from(described.template_config, ready.model, chat_template)
            _try_out(self._template)
        except InvalidRequest as missing:  # completions can still be served
            self._template = missing
        own = self._template if isinstance(self._template, ChatTemplate) else None
        self.formats = choose_formats(own, tool_call_parser, reasoning_parser)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        add_special_tokens: bool | None = None,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        must_fit: bool = False,
    ) -> PreparedPrompt:
        """A conversation through the model's template, or through the text of another.

        With `must_fit` a text that cannot fit the context is refused before it is tokenized.
        """
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"there are {len(messages)} messages and {MAX_MESSAGES} are allowed: leave out the oldest",
                "messages",
            )
        generation = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        plain = [_plain_role(message) for message in messages]
        settings: dict[str, Any] = {
            "add_generation_prompt": generation,
            "continue_final_message": bool(continue_final_message),
        }
        more = _checked(variables or {})

        def render() -> str:
            own = self._own_template()
            shown, offered = self._taken_by(own, plain, tools)
            return own.render(shown, offered, **settings, **more)

        try:
            if template is not None:
                shown, offered = self._taken_by(ChatTemplate(template), plain, tools)
                rendering = Rendering(template, self._special, shown, offered, variables=more, **settings)
                text = await self._sent.render(rendering)
            else:
                is_long = is_larger([*messages, *tools, more], LONG)
                text = await asyncio.to_thread(render) if is_long else render()
        except RecursionError:
            raise InvalidRequest("the request nests too deeply: send flatter values", "messages") from None
        try:
            goes_on = bool(continue_final_message)
            return (await self._prepared([text], bool(add_special_tokens), must_fit, goes_on))[0]
        except InvalidRequest as error:
            raise error.renamed({"prompt": "messages"}) from None

    async def completions(
        self,
        prompt: str | Sequence[Any],
        add_special_tokens: bool | None = None,
        must_fit: bool = False,
    ) -> list[PreparedPrompt]:
        """One prompt or several, as text or token ids; `must_fit` as in `chat`."""
        prompts = as_list(prompt)
        if not prompts:
            raise InvalidRequest("prompt is an empty list: send at least one prompt", "prompt")
        return await self._prepared(prompts, add_special_tokens is not False, must_fit)

    async def run(self, make: Callable[[], T], num_characters: int) -> T:
        """The result of `make`, which works on texts of this length; see TextThreads."""
        return await self._threads.run(make, num_characters)

    @cached_property
    def longest_prompt(self) -> tuple[int, int] | None:
        """Characters beyond which no request can use a text, and the tokens that it has at least; None: not known."""
        piece = self.tokenizer.max_piece if self.tokenizer is not None else None
        if piece is None:
            return None
        most = max(self.max_characters, piece * self.max_model_len)
        return most, most // piece

    async def ready_to_sample(self, sampling: SamplingParams) -> SamplingParams:
        """With the token ids of its bad words."""
        size = sum(map(len, sampling.bad_words))
        return await self._threads.run(lambda: ready_to_sample(sampling, self.tokenizer), size)

    @cached_property
    def infill(self) -> Infill | None:
        """The model's fill-in-the-middle tokens, if it has them."""
        return None if self.tokenizer is None else Infill.of(self.tokenizer)

    async def infilled(
        self,
        prompt: str | Sequence[Any],
        suffix: str,
        add_special_tokens: bool | None = None,
        must_fit: bool = False,
    ) -> list[PreparedPrompt]:
        """Prompts for what stands between each of the texts and `suffix`; `must_fit` as in `chat`."""
        infill, tokenizer, prompts = self.infill, self.tokenizer, as_list(prompt)
        if infill is None or tokenizer is None:
            raise InvalidRequest(
                "suffix needs a model with fill-in-the-middle tokens, such as Qwen2.5-Coder, StarCoder2, CodeLlama or "
                "DeepSeek-Coder, and this one has none: leave suffix out",
                "suffix",
            )
        texts = [item for item in prompts if isinstance(item, str)]
        if not texts or len(texts) < len(prompts):
            raise InvalidRequest("suffix needs a prompt of text: send no token ids with it", "prompt")
        special = add_special_tokens is not False
        self._check_length([*texts, suffix], must_fit)

        def make() -> list[PreparedPrompt]:
            return [
                PreparedPrompt(text, infill.token_ids(text, suffix, tokenizer, add_special_tokens=special))
                for text in texts
            ]

        return await self._threads.run(make, sum(map(len, texts)) + len(texts) * len(suffix))

    def fitted(self, prompt: PreparedPrompt, keep: int | None, max_tokens: int | None) -> PreparedPrompt:
        """The prompt, cut to its last `keep` tokens if asked; -1 leaves room for `max_tokens`."""
        if keep is None:
            return prompt
        if keep < -1 or keep == 0:
            raise InvalidRequest(
                f"truncate_prompt_tokens={keep}: give at least 1, or -1 for as many as fit",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(1, self.max_model_len - (max_tokens or 1))
        if len(prompt.token_ids) <= keep:
            return prompt
        # its text is no longer what the context sent
        return replace(prompt, text=None, token_ids=prompt.token_ids[-keep:])

    async def close(self) -> None:
        await self._sent.close()

    async def _prepared(
        self, prompts: Sequence[Any], add_special_tokens: bool, must_fit: bool, goes_on: bool = True
    ) -> list[PreparedPrompt]:
        self._check_length(prompts, must_fit)
        goes_on = goes_on and self._may_go_on

        def make() -> list[PreparedPrompt]:
            return [
                prepare(item, self.tokenizer, add_special_tokens=add_special_tokens, goes_on=goes_on)
                for item in prompts
            ]

        return await self._threads.run(make, sum(len(item) for item in prompts))

    @property
    def calls_tools(self) -> bool:
        """Whether the model was made to call tools: its own template shows them."""
        return isinstance(self._template, ChatTemplate) and self._template.reads_tools

    @property
    def max_characters(self) -> int:
        """Of a text that is tokenized to be counted or cut."""
        return max(MAX_CHARACTERS, 8 * self.max_model_len)

    def _check_length(self, prompts: Sequence[Any], must_fit: bool) -> None:
        for prompt in prompts:
            if must_fit:
                check_fits(prompt, self.tokenizer, self.max_model_len)
            else:
                check_characters(prompt, self.max_characters, "prompt")

    def _own_template(self) -> ChatTemplate:
        if isinstance(self._template, InvalidRequest):
            raise self._template
        return self._template

    def _taken_by(
        self, template: ChatTemplate, messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Messages and tools as the template takes them: tools are described in text to one that does not know them."""
        if template.reads_tools:
            return messages, tools or None
        if tools or any(message.get("role") == "tool" or message.get("tool_calls") for message in messages):
            return described(messages, tools, self.formats.tools), None
        return messages, None


def _try_out(template: ChatTemplate) -> None:
    """A template that is no valid jinja ends the start, with ConfigError, not the first request."""
    with suppress(InvalidRequest):  # it may want other messages than this one
        template.render([{"role": "user", "content": "Hello"}])


def _plain_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's newer name for a system message; templates know the old one."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _checked(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables for the template, none of which may stand in for what the server itself gives it."""
    taken = {"messages", "tools", "add_generation_prompt", "continue_final_message"}.intersection(variables)
    if taken:
        name = sorted(taken)[0]
        raise InvalidRequest(
            f"chat_template_kwargs may not set {name!r}: send it as a field of its own",
            "chat_template_kwargs",
        )
    return variables
