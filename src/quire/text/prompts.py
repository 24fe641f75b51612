"""Prompts as text, token ids or mappings, tokenized to PreparedPrompt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from quire.core.errors import ContextExceeded, InvalidRequest
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    priority: int = 0  # lower first, with schedule="priority"
    tenant: str = ""  # shares are divided between tenants, with schedule="fair"
    goes_on: bool = True  # the answer continues the prompt's text; False: it is a message of its own

    def context_id(self, tokenizer: Tokenizer | None) -> int | None:
        """The token behind which the answer's text is made, see Tokenizer.context_id."""
        return tokenizer.context_id(self.token_ids) if self.goes_on and tokenizer is not None else None

    def request(self, request_id: str, sampling: SamplingParams, adapter: str | None = None) -> Request:
        """The prompt as the engine takes it."""
        return Request(
            request_id,
            self.token_ids,
            sampling,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            adapter=adapter,
        )


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: text, {"prompt": …}, {"prompt_token_ids": […]} or a list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    several: list[Any] = _listed(prompts)
    is_token_ids = bool(several) and all(isinstance(item, Integral) for item in several)
    return [several] if is_token_ids else several


def prepare(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    add_special_tokens: bool = True,
    goes_on: bool = True,
    max_model_len: int | None = None,
) -> PreparedPrompt:
    """Raises ContextExceeded, before any work, for a text that cannot fit `max_model_len` tokens."""
    options: dict[str, Any] = {"goes_on": goes_on}
    if isinstance(prompt, Mapping):
        options |= _options(prompt)
        if prompt.get("prompt_token_ids") is not None:
            return PreparedPrompt(prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"]), **options)
        if "prompt" not in prompt:
            raise InvalidRequest(
                f'a prompt needs "prompt" or "prompt_token_ids", this one has {sorted(prompt)}', "prompt"
            )
        text = prompt["prompt"]
    elif isinstance(prompt, str):
        text = prompt
    else:
        return PreparedPrompt(None, _token_ids(prompt), goes_on=goes_on)
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: give prompt_token_ids instead of text", "prompt")
    if max_model_len is not None:
        check_fits(text, tokenizer, max_model_len)
    return PreparedPrompt(text, tokenizer.encode(text, add_special_tokens=add_special_tokens), **options)


def check_fits(text: Any, tokenizer: Tokenizer | None, max_model_len: int) -> None:
    """Raises ContextExceeded for a prompt that is certain to have too many tokens, without tokenizing it."""
    if not isinstance(text, str):
        return
    fewest = tokenizer.fewest_tokens(text, max_model_len) if tokenizer is not None else 0
    if fewest >= max_model_len:
        raise ContextExceeded.of_prompt(fewest, max_model_len, at_least=True)


def _options(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The request options in a prompt mapping."""
    priority = prompt.get("priority") or 0
    if not isinstance(priority, int):
        raise InvalidRequest(f"priority={priority!r} is not a whole number", "priority")
    names = {name: str(prompt.get(name) or "") for name in ("cache_salt", "tenant")}
    return {"priority": priority, **names}


def _token_ids(values: Any) -> list[int]:
    token_ids = _listed(values)
    for at, value in enumerate(token_ids):
        if type(value) is not int:
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise InvalidRequest(
                    f"prompt_token_ids contains {value!r}, which is not a token id", "prompt"
                )
            token_ids[at] = int(value)  # of numpy
    return token_ids


def _listed(values: Any) -> list[Any]:
    if isinstance(values, bytes | bytearray) or not isinstance(values, Iterable):
        raise InvalidRequest(f"a prompt is a {type(values).__name__}: give text or token ids", "prompt")
    return list(values)


def cut(token_ids: list[int], length: int) -> list[int]:
    """Truncation for an encoder: the first `length` - 1 tokens and the last, which is its end token."""
    return token_ids if len(token_ids) <= length else [*token_ids[: length - 1], token_ids[-1]]


def ready_to_sample(sampling: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """`sampling` with the token ids of bad_words, and with logprobs where best_of or beams need them."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(
            f"the sampling parameters are a {type(sampling).__name__}: give SamplingParams(…)", "sampling"
        )
    if sampling.bad_words:
        if tokenizer is None:
            raise InvalidRequest("bad_words need a tokenizer, and this model has none", "bad_words")
        sampling = sampling.changed(bad_words_token_ids=tokenizer.bad_words(sampling.bad_words))
    if sampling.stop and tokenizer is None:
        raise InvalidRequest(
            "stop strings need a tokenizer, and this model has none: use stop_token_ids", "stop"
        )
    ranked = sampling.use_beam_search or sampling.num_sequences > sampling.n
    if ranked and sampling.logprobs is None:
        sampling = sampling.changed(logprobs=0)  # sequences are ranked by it
    return sampling
