"""`quire models`: lists the cached models with size and path, or the architectures that are served."""

import argparse
import json
from dataclasses import asdict

from quire.bench.table import aligned, in_bytes
from quire.cli.parser import Parser
from quire.observe.host import cache_folder
from quire.weights.architectures import KNOWN, TEXT_PARTS, Architecture
from quire.weights.builtin import BUILTIN, BUILTIN_NAME
from quire.weights.cache import CachedItem, list_cached

KINDS = {
    "model": "taken from a package",
    "converted": "converted for this engine",
    "offloaded": "layers that stream from disk",
    "hub": "from the hub",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--known", action="store_true", help="list the architectures that are served, and what each can do"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.known:
        return _known(arguments.json)
    items = list_cached()
    if arguments.json:
        listing = {"cache": cache_folder(), "models": [asdict(item) for item in items]}
        print(json.dumps(listing, indent=2, default=str))
        return 0
    if items:
        header = ["name", "size", "what", "where"]
        rows = [
            [_name(item), in_bytes(item.num_bytes), KINDS.get(item.kind, item.kind), str(item.path)]
            for item in items
            if item.kind != "converted"
        ]
        if converted := [item for item in items if item.kind == "converted"]:  # their names are hashes
            size = in_bytes(sum(item.num_bytes for item in converted))
            rows.append([f"{len(converted)} files", size, KINDS["converted"], str(converted[0].path.parent)])
        print(aligned([header, *rows], right=(1,)))
        print(f"\n{in_bytes(sum(item.num_bytes for item in items))} in all; the cache is {cache_folder()}")
    else:
        print(f"nothing is cached in {cache_folder()}")
    if not any(item.path.name == BUILTIN.file_name for item in items):
        print(
            f"the built-in model, {BUILTIN_NAME}, is fetched ({in_bytes(BUILTIN.num_bytes)}) when it is first used"
        )
    return 0


def _known(as_json: bool) -> int:
    if as_json:
        listing = [
            {"architecture": name, **asdict(known), "lora": known.lora} for name, known in KNOWN.items()
        ]
        texts = {name: architecture for name, (_, architecture) in TEXT_PARTS.items()}
        print(json.dumps({"architectures": listing, "text_parts": texts}, indent=2))
        return 0
    print(aligned([list(COLUMNS), *([name, *features(known)] for name, known in KNOWN.items())]))
    print("\nof models that also read images, the text part alone:")
    print(aligned([[name, "as", architecture] for name, (_, architecture) in TEXT_PARTS.items()]))
    return 0


COLUMNS = ("architecture", "models", "task", "LoRA", "quantization", "GGUF", "windows")


def features(known: Architecture) -> list[str]:
    """What stands behind the name, one entry per column."""
    lora, windows = ("yes" if on else "no" for on in (known.lora, known.windows))
    task = "generate, encoder-decoder" if known.encoder_decoder else known.task
    return [known.models, task, lora, "yes", known.gguf or "no", windows]


def _name(item: CachedItem) -> str:
    return f"{BUILTIN_NAME} (built-in)" if item.path.name == BUILTIN.file_name else item.name
