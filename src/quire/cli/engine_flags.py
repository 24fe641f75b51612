"""The engine's settings as flags, made from the fields of EngineConfig: a new field is a new flag."""

import argparse
import typing
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from typing import Any

from quire.cli.parser import Collect, Gather, Parser
from quire.cli.sizes import parse_bytes
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError

TITLES = {
    "model": "model",
    "memory": "memory",
    "scheduler": "scheduling",
    "runner": "device",
    "speculation": "speculation",
    "adapters": "adapters",
}

HELP = {
    "tokenizer": "a folder or tokenizer.json to use instead of the model's own",
    "dtype": "auto, float32, float16 or bfloat16",
    "quantization": "auto (int8 on a CPU), int8, fp8 (on a GPU that has it), or none for full precision",
    "load_format": "auto, or dummy for random weights in the shape that config.json names",
    "max_model_len": "tokens per sequence, prompt and answer together (default: what the model has)",
    "revision": "branch, tag or commit of a hub model",
    "chat_template": "a jinja file, or the template itself, instead of the model's own",
    "seed": "where random numbers start (and dummy weights)",
    "served_model_name": "what to call the model",
    "block_size": "tokens per block of the pool",
    "num_blocks": "blocks in the pool, instead of a limit in bytes",
    "kv_cache_memory_bytes": "size of the pool, such as 2GiB or 512M (default: from free memory)",
    "gpu_memory_utilization": "share of a GPU's memory to use, weights included",
    "kv_cache_dtype": "numbers in the pool: auto, float32, float16, bfloat16 or (on a GPU) fp8",
    "enable_prefix_caching": "find blocks again whose tokens were computed before",
    "share": "forked sequences share their blocks; --no-share copies all of them, for comparison",
    "reservation": "paged, or max, pow2 or oracle: memory in one piece, taken at admission, for comparison",
    "pin_prefix": "a file of text, or of chat messages in JSON, that many requests begin with: its blocks are computed "
    "at start and kept (may be repeated)",
    "cpu_offload_gb": "GiB of layers that live in host memory and stream to the GPU in every step",
    "weights_memory_gb": "GiB of host memory for weights; layers beyond stream from disk (default: all in memory)",
    "weights_offload_dir": "folder for layers that stream from disk (default: in the cache folder)",
    "max_num_seqs": "sequences that run at once (default: 256 on a CPU, 1024 on a GPU, or one per block)",
    "max_num_batched_tokens": "tokens per step (default: 512 on a CPU, 8192 on a GPU)",
    "max_queue_requests": "requests that may wait",
    "max_queue_tokens": "prompt tokens that may wait (default: no limit)",
    "steps_in_flight": "0 or 1: whether a step is planned while another runs",
    "batching": "continuous, or static or dynamic: batches that start together and end together, for comparison",
    "batch_size": "requests in a static or dynamic batch (default: max_num_seqs)",
    "batch_window_ms": "milliseconds that a dynamic batch waits to be full",
    "preset": "several settings at once: ft is static batching with memory reserved to the maximum",
    "schedule": "who is admitted first: fcfs, priority (lower values), shortest, or fair (shares among keys or users)",
    "max_prompt_chunk": "tokens of one prompt in one step (default: as many as the step has)",
    "preemption_mode": "what happens to a request that must leave the pool: recompute, swap, or auto, the cheaper one",
    "admit_after": "new requests enter once those that had to leave have resumed, or completed",
    "swap_space": "GiB of host memory for requests that must leave the pool; 0 switches swapping off",
    "kv_offload_gb": "GiB of host memory for prefix blocks that the pool evicts, to be found again",
    "kv_offload_dir": "a folder behind that memory, eight times as large, that outlives the engine",
    "device": "auto, cpu, cuda, or simulated:NAME to plan steps for a device that is not here (h200, a100-40g, …)",
    "num_threads": "CPU threads (default: the physical cores)",
    "enforce_eager": "no recorded graphs",
    "speculative_config": 'draft tokens and verify them together: JSON, {"method": "ngram"} looks them up in the text',
    "enable_lora": "serve LoRA adapters; on where one is named or a folder of them is",
    "lora_modules": "adapters as NAME=FOLDER, several if need be; chosen by `model: NAME`",
    "lora_dir": "a folder of adapters, each found by its folder's name; run-time loads come from here only",
    "lora_memory": "unified: adapters live in blocks of the pool; separate: in memory of their own, for comparison",
    "lora_memory_bytes": "size of that separate memory, taken from the pool's (default: a quarter of it)",
    "lora_mode": "batched: any mix in one step; merge: one adapter at a time, merged into the model, for comparison",
    "max_loras": "different adapters that run at once (default: as many as sequences)",
    "max_lora_rank": "refuse adapters of a higher rank (default: 512)",
    "max_cpu_loras": "adapters kept in host memory (default: as many as fit)",
    "max_cpu_lora_bytes": "host memory for adapters (default: a share of what is free, at most 16GiB)",
    "deterministic": "on a GPU: a request's tokens do not depend on its neighbours (slower; on a CPU in int8 always)",
}
_SHORT = {"quantization": ("-q",)}
_REPEATED = {"pin_prefix": "FILE"}
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
_CONVERTERS: dict[str, Callable[[str], Any]] = dict.fromkeys(
    ("kv_cache_memory_bytes", "lora_memory_bytes", "max_cpu_lora_bytes"), parse_bytes
)


def add_model_argument(parser: Parser) -> None:
    parser.add_argument(
        "model_named",
        nargs="?",
        metavar="MODEL",
        help="a folder, a .gguf file or a hub id; the built-in model if left out",
    )
    parser.add_argument("--model", help="the same, as a flag")


def add_engine_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """MODEL, --config and a flag for each setting but those in `without`."""
    add_model_argument(parser)
    parser.add_config_flag()
    default = EngineConfig()
    for part in fields(EngineConfig):
        group = parser.add_argument_group(TITLES.get(part.name, part.name))
        for field in fields(getattr(default, part.name)):
            if field.name != "model" and field.name not in without:
                _add_flag(group, field)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, by a flag or a file, under the names that `LLM(...)` takes."""
    default = EngineConfig()
    names = [field.name for part in fields(EngineConfig) for field in fields(getattr(default, part.name))]
    settings = {name: getattr(arguments, name, None) for name in names}
    named = arguments.model_named
    if named is not None and settings["model"] is not None and named != settings["model"]:
        raise ConfigError(f"two models are named, {named!r} and --model {settings['model']!r}: give one")
    settings["model"] = named if named is not None else settings["model"]
    return {name: value for name, value in settings.items() if value is not None}


def _add_flag(group: Any, field: Field[Any]) -> None:
    kind = _kind(field)
    given: dict[str, Any] = {"dest": field.name, "default": None, "help": _help(field)}
    if field.name in _REPEATED:
        given |= {"action": Collect, "metavar": _REPEATED[field.name]}
    elif kind is bool:
        given["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(field.type) is tuple:
        given |= {"action": Gather, "nargs": "+", "metavar": "NAME=FOLDER"}
    else:
        given["type"] = _CONVERTERS.get(field.name, kind)
        given["metavar"] = "BYTES" if field.name in _CONVERTERS else _METAVARS.get(kind, "VALUE")
    group.add_argument(f"--{field.name.replace('_', '-')}", *_SHORT.get(field.name, ()), **given)


def _kind(field: Field[Any]) -> Callable[[str], Any]:
    """int, float, bool or str, of a field that may also be None."""
    named = [one for one in typing.get_args(field.type) if one is not type(None)] or [field.type]
    return named[0]  # type: ignore[return-value]


def _help(field: Field[Any]) -> str:
    text = HELP.get(field.name, field.name.replace("_", " "))
    if field.default in (None, ()) or field.default is MISSING or "default:" in text:
        return text
    shown = (
        {True: "on", False: "off"}.get(field.default, field.default)
        if _kind(field) is bool
        else field.default
    )
    return f"{text} (default: {shown})"
