"""Flags that several commands share: the engine's settings, sampling parameters, structured output, sizes.

Engine flags are made from the fields of EngineConfig and take their help from there: a new field is a new flag.
"""

import argparse
import json
import re
import typing
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from quire.cli.parser import Collect, FlagGroup, Parser, parse_bytes
from quire.core.config import option_owners, setting_groups
from quire.core.errors import ConfigError, InvalidRequest
from quire.core.sampling import BEAM_SAMPLING, SamplingParams
from quire.core.structured import StructuredOutput
from quire.weights.builtin import is_builtin


def parse_gigabytes(text: str) -> int:
    """As parse_bytes, but a plain number is in GB (1e9), as in "an 80 GB card"."""
    plain = re.fullmatch(r"\s*[0-9.]+\s*", text)
    return parse_bytes(f"{text.strip()}GB" if plain else text)


# ---------------------------------------------------------------------- the engine

TITLES = {"scheduler": "scheduling", "runner": "device", "speculative_config": "speculation"}
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


def add_model_argument(parser: Parser, positional: bool = True) -> None:
    meaning = (
        "a folder, a .gguf file or a hub id, repo:QUANT for a GGUF file there (default: the built-in model)"
    )
    if positional:
        parser.add_argument("model_named", nargs="?", metavar="MODEL", help=meaning)
    else:
        parser.set_defaults(model_named=None)
    parser.add_argument("--model", help="MODEL, as a flag" if positional else meaning)


def add_engine_flags(parser: Parser, without: Collection[str] = (), *, positional: bool = True) -> None:
    """MODEL, --config and a flag for each setting but those in `without`. Not `positional`: --model is the only way."""
    add_model_argument(parser, positional)
    parser.add_config_flag()
    for part, settings in setting_groups().items():
        group = parser.group(TITLES.get(part, part))
        for field in settings:
            if field.name != "model" and field.name not in without:
                add_setting(group, field)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given by flags or a config file, under the names that `LLM(...)` takes."""
    settings = {name: getattr(arguments, name, None) for name in option_owners()}
    named = arguments.model_named
    if named is not None and settings["model"] is not None and named != settings["model"]:
        raise ConfigError(f"two models are named, {named!r} and --model {settings['model']!r}: give one")
    settings["model"] = named if named is not None else settings["model"]
    if is_builtin(settings["model"]):
        settings["model"] = None
    return {name: value for name, value in settings.items() if value is not None}


def add_setting(group: FlagGroup | Parser, field: Field[Any], **given: Any) -> None:
    """The flag of a field that `core.config.setting` made, None where it is not given; `given` is argparse's."""
    kind = kind_of(field)
    flag = {"dest": field.name, "default": None, "help": _help(field), **field.metadata["flag"], **given}
    if kind is bool:
        flag.setdefault("action", argparse.BooleanOptionalAction)
    elif typing.get_origin(field.type) is tuple and "type" not in flag:
        flag["action"] = Collect
    elif "choices" not in flag:
        metavar = flag.setdefault("metavar", _METAVARS.get(kind, "VALUE"))
        flag.setdefault("type", parse_bytes if metavar == "BYTES" else kind)
    group.add_argument(*(field.metadata["names"] or (f"--{field.name.replace('_', '-')}",)), **flag)


def kind_of(field: Field[Any]) -> Callable[[str], Any]:
    """int, float, bool or str, of a field that may also be None."""
    kinds = [kind for kind in typing.get_args(field.type) if kind is not type(None)] or [field.type]
    return kinds[0]  # type: ignore[return-value]


def _help(field: Field[Any]) -> str:
    text: str = field.metadata["help"]
    if field.default in (None, (), "", MISSING) or "default:" in text or "action" in field.metadata["flag"]:
        return text
    shown = {True: "on", False: "off"}[field.default] if kind_of(field) is bool else field.default
    return f"{text} (default: {shown})"


# ---------------------------------------------------------------------- sampling

_NUMBERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "tokens to generate at most"),
    "min_tokens": (int, "tokens to generate at least"),
    "temperature": (float, "0 takes the most likely token, higher is more random"),
    "top_p": (float, "sample from the most likely tokens that make up this probability"),
    "top_k": (int, "sample from this many most likely tokens; 0 for all"),
    "min_p": (float, "leave out tokens less likely than this fraction of the most likely one"),
    "repetition_penalty": (float, "above 1 discourages tokens that occurred, prompt included"),
    "presence_penalty": (float, "discourages tokens that were generated"),
    "frequency_penalty": (float, "the same, in proportion to how often"),
    "seed": (int, "the same seed gives the same tokens"),
    "n": (int, "answers per prompt"),
    "best_of": (int, "sequences to generate; the n most likely are returned"),
    "length_penalty": (float, "beam search: above 0 favours longer answers, below 0 shorter ones"),
    "logprobs": (int, "with --json or --output: log probabilities of each token and this many others"),
    "prompt_logprobs": (int, "the same for the prompt's tokens"),
}
_REPEATED: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "stop": ("--stop", str, "text that ends an answer (repeatable)"),
    "stop_token_ids": ("--stop-token-id", int, "token that ends an answer (repeatable)"),
    "bad_words": ("--bad-word", str, "word that is never generated (repeatable)"),
}
_SWITCHES = {
    "use_beam_search": "beam search with best_of beams; the n best are returned",
    "ignore_eos": "continue after the model's end token",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "skip_special_tokens": "leave special tokens out of the text",
}
_SAMPLING = (*_NUMBERS, *_REPEATED, *_SWITCHES, "logit_bias", "early_stopping")


def add_sampling_flags(parser: Parser, without: tuple[str, ...] = ()) -> None:
    group = parser.group("sampling", "defaults are the model's own, where it recommends any")
    for name, (kind, text) in _NUMBERS.items():
        if name not in without:
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    for name, (flag, kind, text) in _REPEATED.items():
        metavar = "ID" if kind is int else "TEXT"
        group.add_argument(flag, dest=name, action=Collect, type=kind, help=text, metavar=metavar)
    for name, text in _SWITCHES.items():
        group.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, help=text)
    group.add_argument(
        "--early-stopping",
        type=_early_stopping,
        metavar="true|false|never",
        help="end of a beam search: with enough hypotheses, when better ones are unlikely, or impossible",
    )
    group.add_argument(
        "--logit-bias", type=_bias, metavar="JSON", help="added to tokens' logits: '{\"42\": -100}'"
    )


def sampling_from(arguments: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    """`default` with the flags given; InvalidRequest names the flag whose value is out of range."""
    given = given_sampling(arguments)
    if given.get("use_beam_search"):
        default = default.changed(**BEAM_SAMPLING)
    try:
        return default.changed(**given)
    except InvalidRequest as error:
        flags = {name: f"--{name.replace('_', '-')}" for name in _SAMPLING}
        raise error.renamed(flags | {name: flag for name, (flag, *_) in _REPEATED.items()}) from None


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that flags set, under the names of SamplingParams and of requests."""
    values = {name: getattr(arguments, name, None) for name in _SAMPLING}
    return {name: value for name, value in values.items() if value is not None}


def _early_stopping(text: str) -> bool | str:
    known: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return known[text]


def _bias(text: str) -> dict[int, float]:
    try:
        return {int(token_id): float(bias) for token_id, bias in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object from token ids to numbers") from None


# ---------------------------------------------------------------------- structured output


def add_structured_flags(parser: Parser) -> None:
    group = parser.group("structured output", "at most one of these; without, answers are free text")
    group.add_argument("--json-schema", metavar="FILE", help="answers are JSON that this schema describes")
    group.add_argument("--json-object", action="store_true", help="answers are JSON objects")
    group.add_argument("--regex", metavar="TEXT", help="answers match this regular expression as a whole")
    group.add_argument(
        "--grammar", metavar="FILE", help="answers follow this grammar, in Lark's notation or GBNF"
    )
    group.add_argument(
        "--choice", action=Collect, metavar="TEXT", help="answers are one of these (repeatable)"
    )


def structured_from(arguments: argparse.Namespace) -> StructuredOutput | None:
    """InvalidRequest names the flag whose value is invalid."""
    given: dict[str, Any] = {
        "--json-schema": arguments.json_schema,
        "--json-object": arguments.json_object or None,
        "--regex": arguments.regex,
        "--grammar": arguments.grammar,
        "--choice": arguments.choice,
    }
    flags = [flag for flag, value in given.items() if value is not None]
    if not flags:
        return None
    if len(flags) > 1:
        raise InvalidRequest(f"{flags[0]} and {flags[1]} both say what answers look like: give one of them")
    (flag,) = flags
    value = given[flag]
    match flag:
        case "--json-schema":
            return StructuredOutput.json(_content(flag, value), param=flag)
        case "--json-object":
            return StructuredOutput.json(param=flag)
        case "--grammar":
            return StructuredOutput.grammar(_content(flag, value), param=flag)
        case "--regex":
            return StructuredOutput.regex(value, param=flag)
    return StructuredOutput.choice(value, param=flag)


def _content(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{flag} {path}: cannot be read ({error})") from error
