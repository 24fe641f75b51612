"""`quire tune`: measures attention tile sizes on this GPU, once per chip and head shape, and caches the best.

GEMMs need no command: a start measures shapes that it meets for the first time. Both caches are shown and cleared here.
"""

import argparse
import sys
import time

import torch

from quire.bench.table import aligned
from quire.cli.flags import add_engine_flags, engine_settings
from quire.cli.parser import Parser
from quire.cli.start import described_source
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build.resolve import resolve_device, resolve_precision
from quire.kernels.attention import tuning
from quire.kernels.attention.autotune import tune
from quire.kernels.linear import autotune as gemms
from quire.kernels.measurement import tuned_folder
from quire.models import registry


def add_arguments(parser: Parser) -> None:
    instead = parser.exclusive()
    instead.add_argument("--show", action="store_true", help="print the cached measurements and exit")
    instead.add_argument("--reset", action="store_true", help="delete all cached measurements and exit")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.show:
        print(_kept())
    elif arguments.reset:
        count = tuning.cache.forget() + gemms.cache.forget()
        print(f"forgot {count} measurement{'' if count == 1 else 's'} in {tuned_folder()}")
    else:
        _tune(EngineConfig.of(**engine_settings(arguments)))
    return 0


def _tune(config: EngineConfig) -> None:
    device = resolve_device(config.runner.device)
    if device.type != "cuda":
        raise ConfigError(
            "tiles are tuned on the GPU that uses them, and there is none here: run this where the model is served"
        )
    if config.runner.deterministic:
        raise ConfigError("--deterministic keeps its tiles, since they decide bits: there is nothing to tune")
    source = described_source(config)
    model = registry.describe(source.config)
    precision = resolve_precision(config, model)
    query_dtype = precision.format.activation_dtype
    heads = tuning.HeadShape(
        num_kv_heads=model.num_kv_heads,
        group=model.num_heads // model.num_kv_heads,
        head_dim=model.head_dim,
        kv_dtype=precision.kv_dtype,
        query_bytes=query_dtype.itemsize,
        block_size=config.memory.block_size,
    )
    began = time.perf_counter()
    key = tuning.key_of(heads, device)
    tiles = tune(heads, query_dtype, device, _say)
    path = tuning.store(key, tiles)
    print(_text(key, tiles))
    print(f"\nmeasured in {time.perf_counter() - began:.0f} s, kept in {path}: the next start uses it")


def _kept() -> str:
    parts = [_text(key, tiles) + _age(key) for key, tiles in tuning.cache.entries()]
    parts += [_gemms(key, choices) for key, choices in gemms.cache.entries()]
    if not parts:
        return f"nothing was measured yet: the built-in tiles serve (looked in {tuned_folder()})"
    return "\n\n".join(parts)


def _gemms(key: gemms.ChipKey, choices: gemms.Choices) -> str:
    header = ["product", "tokens", "measured", "by another algorithm"]
    rows = []
    for shape, algorithms in sorted(choices.items()):
        others = sum(algorithm != gemms.TORCH_DEFAULT for algorithm in algorithms.values())
        rows.append([shape, f"{min(algorithms)} to {max(algorithms)}", str(len(algorithms)), str(others)])
    table = aligned([header, *rows], right=(2, 3))
    return f"{key.chip}, cuBLASLt {key.library}, PyTorch {key.torch}: matrix products\n{table}"


def _age(key: tuning.TuningKey) -> str:
    """A note if a start on this machine would not use the measurement."""
    if not tuning.serves_here(key):
        return "\nnot used any more: the kernels or Triton changed since, measure again"
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != key.chip:
        return "\nnot used here: this is another chip"
    return ""


def _text(key: tuning.TuningKey, tiles: tuning.TunedTiles) -> str:
    header = ["range", "default", "best", "chosen"]
    rows = [
        [line.what, f"{line.default_us:.2f} µs", f"{line.best_us:.2f} µs", line.chosen]
        for line in tiles.measured
    ]
    table = aligned([header, *rows], right=(1, 2))
    return f"{key.chip}, Triton {key.triton}: {key.heads}\n{table}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
