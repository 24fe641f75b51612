"""Pinned prefixes: texts whose blocks are computed at start and kept, so that prompts that begin with one hit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, InvalidRequest
from quire.engine.engine import Engine
from quire.text.load import choose_tokenizer
from quire.text.template import ChatTemplate, load_template
from quire.text.tokenizer import Tokenizer
from quire.weights.source import Source

MAX_POOL_SHARE = 0.5  # of pinned blocks: requests need the rest


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    path: str
    num_tokens: int
    num_blocks: int

    def __str__(self) -> str:
        return (
            f"pinned    {self.path}: {self.num_tokens:,} tokens in {self.num_blocks:,} blocks, never given up"
        )


def pin_prefixes(engine: Engine, config: EngineConfig, source: Source) -> tuple[PinnedPrefix, ...]:
    """Computes and pins every file that `pin_prefix` names. ConfigError says which cannot be pinned, and why."""
    if not config.memory.pin_prefix:
        return ()
    paged = config.memory.reservation == "paged"
    if not (config.memory.enable_prefix_caching and config.memory.share and paged):
        raise ConfigError(
            "pin_prefix needs the prefix cache: leave out --no-enable-prefix-caching, --no-share and --reservation"
        )
    tokenizer = choose_tokenizer(config.model, source)
    if tokenizer is None:
        raise ConfigError("pin_prefix needs a tokenizer, and this model has none: give one with --tokenizer")
    read = {path: _token_ids(path, config, source, tokenizer) for path in config.memory.pin_prefix}
    _check_fits(read, engine)
    pinned = []
    for path, token_ids in read.items():
        try:
            num_blocks = engine.pin(token_ids)
        except InvalidRequest as refusal:
            raise ConfigError(f"pin_prefix {path}: {refusal}") from refusal
        if num_blocks == 0:
            raise ConfigError(
                f"pin_prefix {path}: {len(token_ids)} tokens do not fill a block of {engine.memory.block_size}, and "
                "only full blocks are found again: leave it out, or lower block_size"
            )
        pinned.append(PinnedPrefix(path, len(token_ids), num_blocks))
    return tuple(pinned)


def _check_fits(read: Mapping[str, Sequence[int]], engine: Engine) -> None:
    memory, context = engine.memory, engine.limits.max_model_len
    for path, token_ids in read.items():
        if len(token_ids) >= context:
            raise ConfigError(
                f"pin_prefix {path}: {len(token_ids)} tokens are too many, the context is {context} and must hold more "
                "than the prefix: shorten it, or raise max_model_len"
            )
    size = memory.block_size
    wanted = sum(memory.blocks_for(len(token_ids) // size * size) for token_ids in read.values())
    if wanted > MAX_POOL_SHARE * memory.num_blocks:
        raise ConfigError(
            f"pin_prefix would hold {wanted} of the pool's {memory.num_blocks} blocks, and at most half may be "
            "pinned: pin less, or raise kv_cache_memory_bytes"
        )


def _token_ids(path: str, config: EngineConfig, source: Source, tokenizer: Tokenizer) -> list[int]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pin_prefix {path}: cannot be read ({error})") from error
    if not text.strip():
        raise ConfigError(f"pin_prefix {path}: the file is empty: give the text that requests begin with")
    messages = _messages(path, text)
    if messages is None:
        return tokenizer.encode(text)
    try:
        template = load_template(source, config.model.chat_template)
        return chat_prefix(messages, template, tokenizer)
    except InvalidRequest as refusal:
        raise ConfigError(f"pin_prefix {path}: {refusal}") from refusal


def _messages(path: str, text: str) -> list[Mapping[str, Any]] | None:
    """Chat messages, if that is what the file holds: a JSON list, or an object with `messages`."""
    try:
        content = json.loads(text)
    except ValueError as error:
        if path.endswith(".json"):
            raise ConfigError(f"pin_prefix {path}: is no valid JSON ({error})") from error
        return None
    if isinstance(content, dict) and "messages" in content:
        content = content["messages"]
    if isinstance(content, list) and content and all(_is_message(entry) for entry in content):
        return content
    if path.endswith(".json"):
        raise ConfigError(
            f'pin_prefix {path}: give a list of messages, [{{"role": "system", "content": "…"}}], or a plain text file'
        )
    return None


def _is_message(entry: object) -> bool:
    return isinstance(entry, dict) and "role" in entry


def chat_prefix(messages: list[Mapping[str, Any]], template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The tokens that every conversation which goes on from these messages begins with.

    A template may write things at a conversation's end that are not there when it goes on: what two
    continuations have in common is what any has.
    """
    if messages[-1].get("role") == "user":  # what follows is the model's own answer
        return tokenizer.encode(template.render(messages), add_special_tokens=False)
    first, second = (
        tokenizer.encode(
            template.render([*messages, {"role": "user", "content": content}]), add_special_tokens=False
        )
        for content in ("a", "1")
    )
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    return first[:same]
