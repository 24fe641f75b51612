"""Which roundings the divergence of int8 from float32 comes from, and what finer ones would give on a CPU.

    python -m quire_lab.benchmarks.rounding [--contexts 12] [--chats 20] [--output benchmarks/results/rounding.json]

Mean KL divergence in nats from float32 of the decoded weights (the token table in float16), on XQuAD's contexts and on
MT-bench's questions in the model's chat template. Weights and activations are rounded in float32 as a format would
round them (quire_lab.measure.rounding), so that each rounding can be looked at alone. `VNNI` is the share of dot
products among the instructions that such a GEMM gives to the multipliers of AVX-512, by counting: a bound of its speed,
relative to int8 with one scale for a row.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire.bench.machine import describe_origin
from quire.bench.table import aligned
from quire.core.config import ModelConfig
from quire.kernels import native
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.text.load import load_tokenizer
from quire.text.template import load_template
from quire.weights.source import Source, open_source
from quire_lab.measure.quality import MAX_TOKENS, compare, each_logits, texts, total
from quire_lab.measure.rounding import EXACT, NONE, ROW, RoundedFormat, Rounding, RoundingOf, part_of
from quire_lab.report.data import DataFolder

INT8 = Rounding(64, ROW, ROW)
PARTS = ("q, k, v", "o", "gate, up", "down", "head")
# what, rounding of every matrix, float multiplications for every 32 columns
CASES: tuple[tuple[str, Rounding, float], ...] = (
    ("int8: mixed by 64, one scale for a row", INT8, 0),
    ("its weights alone", Rounding(64, ROW, EXACT), 0),
    ("its activations alone", Rounding(64, EXACT, ROW), 0),
    ("mixed by whole rows, one scale for a row", Rounding(ROW, ROW, ROW), 0),
    ("mixed by 64, a scale for 192 columns", Rounding(64, 192, 192), 2 / 6),
    ("mixed by 64, a scale for 96 columns", Rounding(64, 96, 96), 2 / 3),
    ("mixed by 64, a scale for 64 columns", Rounding(64, 64, 64), 1),
    ("the file's blocks, activations by 32", Rounding(1, EXACT, 32), 3),
    ("the same, columns mixed by 8", Rounding(8, EXACT, 32), 3),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, default=12)
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--data-dir")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    source = open_source(None)
    groups = prompts(source, DataFolder.at(options.data_dir), options.contexts, options.chats)
    threads = native.default_num_threads()
    native.set_num_threads(threads)
    torch.set_num_threads(threads)
    exact = {name: logits_of(source, everywhere(NONE), group) for name, group in groups.items()}
    model = describe(source.config)
    cases = [(what, everywhere(rounding), f"{8 / (8 + floats):.2f}") for what, rounding, floats in CASES]
    cases += [(f"int8, {part} alone", only_in(model, part), "") for part in PARTS]
    rows: list[dict[str, Any]] = []
    for number, (what, rounding_of, vnni) in enumerate(cases):
        print(f"{number + 1} of {len(cases)}: {what}", file=sys.stderr, flush=True)
        rows.append({"what": what, "VNNI": vnni, **divergences(source, rounding_of, groups, exact)})
    print(as_table(rows))
    if options.output:
        tokens = {name: sum(map(len, group)) for name, group in groups.items()}
        record = {**describe_origin(), "tokens": tokens, "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def prompts(source: Source, data: DataFolder, contexts: int, chats: int) -> dict[str, list[list[int]]]:
    """Token ids of texts and of chats."""
    tokenizer, template = load_tokenizer(source), load_template(source)
    assert tokenizer is not None, "the built-in model has one"
    plain = [
        tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS] for text in texts(data, contexts)[0]
    ]
    questions = data.questions() or [f"Summarize this: {text}" for text in texts(data, chats)[0]]
    spread = questions[:: max(1, len(questions) // chats)][:chats]
    asked = [template.render([{"role": "user", "content": question}]) for question in spread]
    return {"texts": plain, "chats": [tokenizer.encode(text, add_special_tokens=False) for text in asked]}


def everywhere(rounding: Rounding) -> RoundingOf:
    return lambda num_rows, num_columns: rounding


def only_in(model: ModelConfig, part: str) -> RoundingOf:
    return lambda num_rows, num_columns: INT8 if part_of(model, num_rows, num_columns) == part else NONE


def logits_of(
    source: Source, rounding_of: RoundingOf, sequences: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    model = load(source, LayerFactory(RoundedFormat(rounding_of), "cpu", max_position=MAX_TOKENS))
    return list(each_logits(model, sequences, "float16"))


def divergences(
    source: Source,
    rounding_of: RoundingOf,
    groups: dict[str, list[list[int]]],
    exact: dict[str, list[torch.Tensor]],
) -> dict[str, float]:
    """Mean KL divergence by group of prompts."""
    return {
        name: total(map(compare, exact[name], logits_of(source, rounding_of, group), group)).mean_kl
        for name, group in groups.items()
    }


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["rounded as", "VNNI", "KL on texts", "KL on chats"]
    lines = [[row["what"], row["VNNI"], f"{row['texts']:.4f}", f"{row['chats']:.4f}"] for row in rows]
    return aligned([head, *lines], right=range(1, len(head)))


if __name__ == "__main__":
    main()
