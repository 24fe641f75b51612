"""SpeculativeConfig: how tokens are drafted, how many, and when drafting is switched off."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.core.draft import MAX_NODES
from quire.core.errors import ConfigError

METHODS = ("ngram", "draft_model")
ACCEPTANCES = ("coupled", "rejection")
MAX_DRAFT = 32  # tokens; acceptance beyond is too rare to pay
MAX_WIDTH = 16  # branches of a tree
# tokens of a prompt-lookup draft, which costs nothing to make: with the last token a whole tile of 16 rows
LOOKED_UP = 15


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The fields of `--speculative-config`. Lengths are upper bounds: the engine drafts less where that is faster."""

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_max: int = 4  # tokens of the longest n-gram that is looked up
    prompt_lookup_min: int = 2
    model: str | None = None  # of method draft_model: a folder, a .gguf file or a hub id
    quantization: str = "auto"  # of the draft model
    disable_by_batch_size: int | None = None  # no drafts from this batch size on; None: max_num_seqs
    adaptive: bool = True  # False: always the full length and width, for experiments
    tree_width: int = 1  # branches of a token tree, at most; 1: drafts are chains
    acceptance: str = "coupled"  # "rejection": rejection sampling, for requests without a seed

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config: method {self.method!r} is not known: choose one of {', '.join(METHODS)}"
            )
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "tree_width"):
            _check_count(name, getattr(self, name))
        if self.num_speculative_tokens > MAX_DRAFT:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens is {self.num_speculative_tokens}: at most {MAX_DRAFT}"
            )
        self._check_tree()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) is more than prompt_lookup_max "
                f"({self.prompt_lookup_max}): lower it"
            )
        if self.disable_by_batch_size is not None:
            _check_count("disable_by_batch_size", self.disable_by_batch_size)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive is {self.adaptive!r}: give true or false")
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                "speculative_config: give method draft_model and its model together"
                if self.model is None
                else f"speculative_config: method {self.method} has no model of its own: leave out model"
            )

    def _check_tree(self) -> None:
        width, num_nodes = self.tree_width, self.tree_width * self.num_speculative_tokens
        if width > MAX_WIDTH:
            raise ConfigError(f"speculative_config: tree_width is {width}: at most {MAX_WIDTH}")
        if width > 1 and num_nodes > MAX_NODES:
            raise ConfigError(
                f"speculative_config: tree_width × num_speculative_tokens is {width} × {self.num_speculative_tokens} = "
                f"{num_nodes}: a tree has at most {MAX_NODES} tokens, so lower one of them"
            )
        if self.acceptance not in ACCEPTANCES:
            raise ConfigError(
                f"speculative_config: acceptance {self.acceptance!r} is not known: choose one of "
                f"{', '.join(ACCEPTANCES)}"
            )
        if self.acceptance == "rejection" and self.method != "draft_model":
            raise ConfigError(
                f"speculative_config: acceptance rejection needs a draft's probabilities, and {self.method} has none: "
                "choose method draft_model or leave acceptance out"
            )

    @property
    def in_words(self) -> str:
        lookup = f"looked up by {self.prompt_lookup_min} to {self.prompt_lookup_max} tokens"
        drafter = lookup if self.method == "ngram" else f"by {self.model}"
        tree = f" in trees of {self.tree_width} branches" if self.tree_width > 1 else ""
        rejection = ", accepted by rejection sampling" if self.acceptance == "rejection" else ""
        always = "" if self.adaptive else ", always"
        return f"{drafter}, at most {self.num_speculative_tokens} tokens{tree}{always}{rejection}"


def parse_speculative(given: SpeculativeConfig | str | Mapping[str, Any]) -> SpeculativeConfig:
    """From JSON or a mapping. ConfigError for an unknown or missing name, or an invalid value."""
    if isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON ({error}): {given!r}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be a JSON object with a method, not {given!r}")
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f": did you mean {near[0]}?" if near else f". Known: {', '.join(known)}"
            raise ConfigError(f"speculative_config: unknown name {name!r}{hint}")
    if "method" not in given:
        raise ConfigError(f"speculative_config has no method: choose one of {', '.join(METHODS)}")
    usual: dict[str, Any] = {}
    if given["method"] == "ngram" and given.get("tree_width", 1) == 1:
        usual["num_speculative_tokens"] = LOOKED_UP
    return SpeculativeConfig(**{**usual, **given})


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"speculative_config: {name} is {value!r}: give a whole number of at least 1")
