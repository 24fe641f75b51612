"""From a request's fields to SamplingParams, over the model's recommended values; structured output included."""

from dataclasses import fields, replace
from typing import Any, TypeVar

from starlette.requests import Request

from quire.core.errors import InvalidRequest
from quire.core.sampling import BEAM_SAMPLING, GREEDY_BELOW, SamplingParams
from quire.core.structured import StructuredOutput
from quire.link.messages import Ready
from quire.server.access import add_warning
from quire.server.protocol.base import SamplingFields
from quire.server.protocol.completions import ChatCompletionRequest, CompletionRequest
from quire.server.schemas import served_form

B = TypeVar("B", bound=SamplingFields)
COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat's answer may fill the context
_STRUCTURED_FIELDS = {  # field -> what StructuredOutput.of calls it
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "regex": "regex",
    "grammar": "grammar",
}
# A request's fields that SamplingParams has under the same name.
_SAME = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in SamplingFields.model_fields and field.name not in ("max_tokens", "logit_bias")
)


def chat_sampling(body: ChatCompletionRequest, recommended: SamplingParams) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: set logprobs to true", "top_logprobs")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    own: dict[str, Any] = {"max_tokens": limit}
    if body.logprobs:
        own["logprobs"] = body.top_logprobs or 0
    names = {"logprobs": "top_logprobs"}
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        return _sampling(body, recommended, own)
    except InvalidRequest as error:
        raise error.renamed(names) from None


def greedy_copies(body: B, ready: Ready) -> tuple[B, int]:
    """The request with n=1 and how often its answer is returned, if all n would be the same; else itself and 1."""
    n, temperature = body.n or 1, body.temperature
    temperature = ready.default_sampling.temperature if temperature is None else temperature
    samples = temperature >= GREEDY_BELOW or bool(body.use_beam_search) or body.best_of not in (None, n)
    if n < 2 or temperature < 0 or samples:
        return body, 1
    if n > ready.limits.max_num_seqs:
        raise InvalidRequest(
            f"n={n} is more than the {ready.limits.max_num_seqs} answers of one request: lower n or raise max_num_seqs",
            "n",
        )
    return body.model_copy(update={"n": 1, "best_of": None}), n


def completion_sampling(body: CompletionRequest, recommended: SamplingParams) -> SamplingParams:
    limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and limit == 0:
        limit = 1  # the prompt alone is wanted; the engine's one token is not shown
    own: dict[str, Any] = {"max_tokens": limit}
    if body.logprobs is not None:
        own["logprobs"] = body.logprobs
        if body.echo:
            own["prompt_logprobs"] = body.logprobs
    return _sampling(body, recommended, own)


def _sampling(body: SamplingFields, recommended: SamplingParams, own: dict[str, Any]) -> SamplingParams:
    """What the request has set, and its endpoint's `own` values, over the recommended ones, which do not apply to beam
    search. Raises for what cannot be streamed."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: set stream to true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs come with a whole answer: set stream to false", "prompt_logprobs"
        )
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    given["structured"] = structured_output(body)
    base = recommended.changed(**BEAM_SAMPLING) if body.use_beam_search else recommended
    sampling = base.changed(**(given | own))
    if body.stream and sampling.use_beam_search:
        raise InvalidRequest(
            "beams are known at the end only, so partial ones cannot be streamed: set stream to false",
            "stream",
        )
    if body.stream and sampling.num_sequences > sampling.n:
        raise InvalidRequest(
            f"best_of={sampling.best_of} can only be chosen from at the end: set stream to false", "best_of"
        )
    return sampling


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise InvalidRequest(f"logit_bias has the key {key[:40]!r}: keys are token ids", "logit_bias")
    return int(key)


# ---------------------------------------------------------------------- structured output


def with_served_form(request: Request, sampling: SamplingParams) -> SamplingParams:
    """The sampling with its schema as the grammar gets it; what is not enforced is said in warnings."""
    if sampling.structured is None:
        return sampling
    form, warnings = served_form(sampling.structured)
    for warning in warnings:
        add_warning(request, warning)
    return sampling.changed(structured=form)


def structured_output(body: SamplingFields) -> StructuredOutput | None:
    """The form that the answer must have; None: any text. An error names the wrong field, or two that contradict.

    A schema is strict only if the request says so.
    """
    given = [_from_format(body.response_format)] if body.response_format is not None else []
    if body.structured_outputs is not None:
        given.append(
            replace(StructuredOutput.of(body.structured_outputs, "structured_outputs"), strict=False)
        )
    for name, kind in _STRUCTURED_FIELDS.items():
        value = getattr(body, name)
        if value is not None:
            given.append(replace(StructuredOutput.of({kind: value}, name), strict=False))
    forms = [form for form in given if form is not None]
    if len(forms) > 1:
        raise InvalidRequest(
            f"{forms[0].param} and {forms[1].param} both say what the answer must look like: send one of them",
            forms[1].param,
        )
    return forms[0] if forms else None


def _from_format(response_format: dict[str, Any]) -> StructuredOutput | None:
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(schema)}:  # as some servers spell a schema
            return StructuredOutput.json(schema, strict=False, param="response_format")
        case {"type": "json_object"}:
            return StructuredOutput.json(param="response_format")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            strict = rest.get("strict")
            if not isinstance(strict, (bool, type(None))):
                raise _wrong_format(f"json_schema.strict is {_shown(strict)}: give true or false")
            return StructuredOutput.json(schema, strict=bool(strict), param="response_format")
        case {"type": "json_schema"}:
            raise _wrong_format("of type json_schema needs json_schema.schema, an object")
    kind = _shown(response_format.get("type"))
    raise _wrong_format(f"has the type {kind}: give 'text', 'json_object' or 'json_schema'")


def _wrong_format(problem: str) -> InvalidRequest:
    return InvalidRequest(f"{{param}} {problem}", "response_format")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 64 else shown[:64] + "…"
