"""What number formats cost in quality on a CPU: KL divergence to float32 and equal greedy tokens, beside llama.cpp.

    python -m quire_lab.benchmarks.quality [--contexts 50] [--model FILE.gguf] [--formats none int8 checkpoint llm-int8]

Every engine gets the same token ids of XQuAD's English contexts and gives the logits after each of them. All are
compared with Quire's float32 logits of the dequantized weights. Equal greedy tokens: positions with the same most
likely token. llama.cpp reads the same GGUF file, in .compare-quality/, which the first run makes from
requirements/quality.txt (it is compiled there, for this CPU).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.bench.machine import describe_origin
from quire.bench.table import aligned
from quire.kernels import native
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.models.weight_shape import weight_shape
from quire.text.load import load_tokenizer
from quire.weights.source import Source, open_source
from quire_lab.benchmarks.compare_cpu.__main__ import ROOT, describe_model, find_model, peer_python
from quire_lab.measure.formats import FORMATS, format_named
from quire_lab.measure.quality import (
    MAX_TOKENS,
    KeptLogits,
    Quality,
    compare,
    each_logits,
    kv_dtype_of,
    texts,
    total,
)
from quire_lab.report.data import DataFolder

RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
ENVIRONMENT, REQUIREMENTS = ROOT / ".compare-quality", ROOT / "requirements" / "quality.txt"
USUAL = ("int8", "checkpoint", "llm-int8")
LLAMA_CPP = "llama.cpp"


def main() -> None:
    options = parse_options()
    source = open_source(options.model)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        sys.exit("the model has no tokenizer, and texts are needed: name another with --model")
    chosen, origin = texts(DataFolder.at(options.data_dir), options.contexts)
    sequences = [tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS] for text in chosen]
    print(f"{origin}, {sum(map(len, sequences)):,} tokens", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows, peer = measure(source, sequences, Path(folder), options)
    print(as_table(rows))
    if options.output:
        record = {
            **describe_origin(),
            "model": describe_model(options.model),
            "texts": origin,
            "num_tokens": sum(map(len, sequences)),
            "peer": peer,
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF; default: the built-in model")
    parser.add_argument("--contexts", type=int, default=50)
    parser.add_argument("--data-dir")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(USUAL))
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    parser.add_argument("--output", type=Path, help=f"such as {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    options.model = find_model(options.model)
    return options


def measure(
    source: Source, sequences: list[list[int]], folder: Path, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    kept = KeptLogits(folder)
    for index, logits in enumerate(logits_in(source, "none", sequences)):
        kept.keep(index, logits)
    model = describe(source.config)
    rows = []
    for name in ("none", *(name for name in options.formats if name != "none")):
        logits = (
            logits_in(source, name, sequences)
            if name != "none"
            else map(kept.__getitem__, range(len(sequences)))
        )
        num_bytes = weight_shape(model, format_named(name), source.encodings).num_bytes
        rows.append(row(name, kept, logits, sequences) | {"weights_bytes": num_bytes})
        print(as_table(rows[-1:]), flush=True)
    if options.no_peer:
        return rows, None
    peer = KeptLogits(folder / "peer")
    about = run_llama_cpp(options.model, sequences, folder / "peer")
    rows.append(row(LLAMA_CPP, kept, map(peer.__getitem__, range(len(sequences))), sequences))
    rows[-1]["weights_bytes"] = source.num_bytes
    return rows, about


def logits_in(source: Source, name: str, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Text by text; the model is loaded once."""
    number_format = format_named(name)
    threads = native.default_num_threads()
    native.set_num_threads(threads)
    torch.set_num_threads(1 if number_format.native else threads)
    model = load(source, LayerFactory(number_format, "cpu", max_position=MAX_TOKENS))
    yield from each_logits(model, sequences, kv_dtype_of(number_format))
    torch.set_num_threads(threads)


def row(
    name: str, kept: KeptLogits, by_text: Iterator[Tensor], sequences: Sequence[Sequence[int]]
) -> dict[str, Any]:
    parts: list[Quality] = []
    for index, (token_ids, logits) in enumerate(zip(sequences, by_text, strict=True)):
        parts.append(compare(kept[index], logits, token_ids))
        if sys.stderr.isatty():
            print(f"\r{name}: {index + 1} of {len(sequences)}", end="", file=sys.stderr, flush=True)
    return {
        "format": name,
        **total(parts).record(),
        "mean_kl_by_context": [round(part.mean_kl, 7) for part in parts],
    }


def run_llama_cpp(model: Path, sequences: Sequence[Sequence[int]], folder: Path) -> dict[str, str]:
    """Leaves its logits in the folder; its versions."""
    folder.mkdir()
    listed = folder / "texts.json"
    listed.write_text(json.dumps(sequences))
    command = [
        str(peer_python(ENVIRONMENT, REQUIREMENTS)),
        *("-m", "quire_lab.benchmarks.llamacpp_logits"),
        *(str(model), str(listed), str(folder), str(native.default_num_threads())),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"llama.cpp failed: {done.stderr.strip().splitlines()[-1:]}. Without it: --no-peer")
    about: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return about


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("format", lambda one: one["format"]),
    ("mean KL", lambda one: f"{one['mean_kl']:.5f}"),
    ("largest KL", lambda one: f"{one['largest_kl']:.3f}"),
    ("equal greedy tokens", lambda one: f"{100 * one['equal_greedy_tokens']:.2f} %"),
    ("perplexity", lambda one: f"{one['perplexity']:.4f}"),
    ("weights", lambda one: f"{one['weights_bytes'] / 1e6:,.0f} MB"),
)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    head = [name for name, _ in COLUMNS]
    return aligned([head, *([text(one) for _, text in COLUMNS] for one in rows)], right=range(1, len(head)))


if __name__ == "__main__":
    main()
