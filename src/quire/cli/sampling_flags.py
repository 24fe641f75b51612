"""Sampling parameters as flags. What is not given comes from the model's own recommendation."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from quire.cli.parser import Collect, Parser
from quire.core.beam_params import NOTHING_DRAWN
from quire.core.sampling import SamplingParams

_NUMBERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "tokens to generate at most"),
    "min_tokens": (int, "tokens to generate at least"),
    "temperature": (float, "0 takes the best token, higher is more random"),
    "top_p": (float, "choose among the best tokens that make up this probability"),
    "top_k": (int, "choose among this many best tokens; 0 for all"),
    "min_p": (float, "leave out tokens less likely than this share of the best one"),
    "repetition_penalty": (float, "above 1 discourages tokens that occurred, prompt included"),
    "presence_penalty": (float, "discourages tokens that were generated"),
    "frequency_penalty": (float, "the same, by how often they were"),
    "seed": (int, "the same seed gives the same tokens"),
    "n": (int, "answers per prompt"),
    "best_of": (int, "sequences to generate; the n most likely are returned"),
    "length_penalty": (float, "of beams: above 0 favours longer answers, below 0 shorter ones"),
    "logprobs": (int, "with --json or --output: log probabilities of each token and this many others"),
    "prompt_logprobs": (int, "likewise for the prompt's tokens"),
}
_REPEATED: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "stop": ("--stop", str, "text that ends an answer (repeatable)"),
    "stop_token_ids": ("--stop-token-id", int, "token that ends an answer (repeatable)"),
    "bad_words": ("--bad-word", str, "word that is never generated (repeatable)"),
}
_SWITCHES = {
    "use_beam_search": "keep the best_of most likely continuations (beams); the n best are returned",
    "ignore_eos": "go on after the model's end token",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "skip_special_tokens": "leave special tokens out of the text",
}
NAMES = (*_NUMBERS, *_REPEATED, *_SWITCHES, "logit_bias", "early_stopping")


def add_sampling_flags(parser: Parser, without: tuple[str, ...] = ()) -> None:
    group = parser.add_argument_group("sampling", "defaults are the model's own, where it recommends any")
    for name, (kind, text) in _NUMBERS.items():
        if name not in without:
            group.add_argument(
                f"--{name.replace('_', '-')}", type=kind, help=text, metavar="N" if kind is int else "X"
            )
    for name, (flag, kind, text) in _REPEATED.items():
        if name not in without:
            metavar = "ID" if kind is int else "TEXT"
            group.add_argument(flag, dest=name, action=Collect, type=kind, help=text, metavar=metavar)
    for name, text in _SWITCHES.items():
        if name not in without:
            group.add_argument(
                f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, help=text
            )
    if "early_stopping" not in without:
        group.add_argument(
            "--early-stopping",
            type=_early_stopping,
            metavar="true|false|never",
            help="of beams: end with enough hypotheses, when better ones are unlikely, or impossible",
        )
    if "logit_bias" not in without:
        group.add_argument(
            "--logit-bias", type=_bias, metavar="JSON", help="added to tokens' logits: '{\"42\": -100}'"
        )


def sampling_from(arguments: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    """`default` with what was given; InvalidRequest names a value that cannot be."""
    given = {name: getattr(arguments, name, None) for name in NAMES}
    if given["use_beam_search"]:
        default = default.changed(**NOTHING_DRAWN)
    return default.changed(**{name: value for name, value in given.items() if value is not None})


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
