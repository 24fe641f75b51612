"""Claims made for number formats, judged by weights and logits: NF4, double quantization, LLM.int8."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import QuireError
from quire.layers.factory import LayerFactory
from quire.models.model import DecoderModel
from quire.quant.encoded import floats
from quire.quant.format import NumberFormat
from quire.weights.builtin import BUILTIN_ENCODER, BUILTIN_ENCODER_NAME
from quire.weights.source import Source, open_source
from quire_lab.measure.formats import (
    FOUR_BITS,
    SYMMETRIC,
    VECTOR_WISE,
    Rounded,
    decoded_matrices,
    format_named,
    rounded,
)
from quire_lab.measure.outliers import FACTOR, NUM_CHANNELS, OutlierShare, WatchedLlmInt8, can_inject, loaded
from quire_lab.measure.quality import KeptLogits, each_logits, kv_dtype_of, logits_of, quality_of, total
from quire_lab.report.experiment import Check, Setup, Table
from quire_lab.report.figure import bar_style, plain_log

NORMAL, MODEL = "normal weights", "this model"
SAVED_BITS = 0.373  # by double quantization, as QLoRA has it
TIMES = 10.0  # plain int8 diverges at least this many times as far as the decomposition
WITHIN = 1.5  # and the decomposition at most this many times as far as int8 without outliers
BATCH = 80
INT8 = (VECTOR_WISE, "int8", "llm-int8")


@dataclass(frozen=True, slots=True)
class LlmInt8Result:
    """Mean KL divergence by format, as the model is and with injected outliers."""

    quiet: Mapping[str, float]
    loud: Mapping[str, float]
    exact: float  # of float32 with outliers: the function is the same
    shares: Sequence[Sequence[OutlierShare]]  # of the model with outliers, by layer and matrix
    same_bits: bool  # of rows alone and in a batch


@dataclass(frozen=True, slots=True)
class Claims:
    rounded: Mapping[str, Mapping[str, Rounded]]  # weights -> scheme
    llm_int8: LlmInt8Result | None  # None: the model's norms are not where Llama's are
    notes: Sequence[str]

    @property
    def checks(self) -> list[Check]:
        judged = [order_check(name, by_scheme) for name, by_scheme in self.rounded.items()]
        judged += [_asymmetric(name, by_scheme) for name, by_scheme in self.rounded.items() if name != MODEL]
        judged.append(_double(self.rounded[NORMAL]))
        return judged + (outlier_checks(self.llm_int8) if self.llm_int8 else [])

    def tables(self) -> list[Table]:
        names = list(self.rounded)
        rows = [
            [scheme, *(f"{self.rounded[name][scheme].error:.4f}" for name in names),
             f"{self.rounded[NORMAL][scheme].bits:.3f}"]
            for scheme in FOUR_BITS
        ]  # fmt: skip
        tables = [Table("Relative weight error at blocks of 64", ["scheme", *names, "bits"], rows)]
        result = self.llm_int8
        if result is None:
            return tables
        rows = [[name, f"{result.quiet[name]:.5f}", f"{result.loud[name]:.5f}"] for name in INT8]
        loud = f"{NUM_CHANNELS} channels × {FACTOR:.0f}"
        tables.append(Table("LLM.int8: mean KL to float32", ["format", "as it is", loud], rows))
        width = max(map(len, result.shares))
        rows = [[str(i), *map(str, shares)] for i, shares in enumerate(result.shares)]
        names = ["qkv", "output", "gate_up", "down"] if width == 4 else [f"matrix {i}" for i in range(width)]
        tables.append(Table("Share of outliers by layer, with outliers injected", ["layer", *names], rows))
        return tables

    def record(self) -> dict[str, Any]:
        result = self.llm_int8
        return {
            "weights": {
                name: {
                    scheme: {"error": weights.error, "bits": weights.bits}
                    for scheme, weights in by_scheme.items()
                }
                for name, by_scheme in self.rounded.items()
            },
            "llm_int8": None
            if result is None
            else {
                "mean_kl": dict(result.quiet),
                "mean_kl_with_outliers": dict(result.loud),
                "float32_with_outliers": result.exact,
                "outlier_share_by_layer": [[share.outliers for share in shares] for shares in result.shares],
                "fine_columns_by_layer": [[share.num_fine for share in shares] for shares in result.shares],
                "same_bits_alone_and_in_a_batch": result.same_bits,
            },
        }

    def draw(self, axis: Any) -> None:
        result = self.llm_int8
        if result is None:
            axis.set_axis_off()
            return
        for series, (words, by_format) in enumerate(
            (("as it is", result.quiet), ("with outliers", result.loud))
        ):
            places = [i + 0.4 * series for i in range(len(INT8))]
            axis.bar(places, [by_format[name] for name in INT8], width=0.4, label=words, **bar_style(series))
        axis.set_xticks([i + 0.2 for i in range(len(INT8))], INT8)
        plain_log(axis, "y")
        axis.set(title=f"LLM.int8: {NUM_CHANNELS} channels × {FACTOR:.0f}", ylabel="mean KL to float32")
        axis.legend(loc="best")


def claims_of(
    setup: Setup, source: Source, model: DecoderModel, sequences: Sequence[Sequence[int]], kept: KeptLogits
) -> Claims:
    """`model` in float32, whose logits of the sequences are `kept`."""
    most = setup.pick(1 << 19, 1 << 22, 1 << 25)
    generator = torch.Generator().manual_seed(setup.seed)
    weights = {NORMAL: [torch.randn(512, min(4096, most // 512), generator=generator)]}
    mine = _sampled(decoded_matrices(model), most)
    notes = []
    if mine:
        weights[MODEL] = mine
    else:
        notes.append(
            "no matrix of the model has rows of a multiple of 64 columns: its weights are not judged"
        )
    encoder = encoder_weights(most)
    if encoder:
        weights[BUILTIN_ENCODER_NAME] = encoder
    else:
        notes.append(f"{BUILTIN_ENCODER_NAME}, whose weights are float32, is not in the cache: not judged")
    by_weights = {
        name: {scheme: rounded(scheme, few) for scheme in FOUR_BITS} for name, few in weights.items()
    }
    result = None
    if can_inject(model.loaders()):
        result = measure_llm_int8(setup, source, sequences[: setup.pick(1, 4, 50)], kept)
    else:
        notes.append("LLM.int8 with outliers is measured on models of Llama's kind: this one is not")
    return Claims(by_weights, result, notes)


def _sampled(matrices: Iterable[Tensor], most: int) -> list[Tensor]:
    """Matrices that blocks of 64 divide, until there are `most` weights."""
    kept: list[Tensor] = []
    for matrix in matrices:
        if matrix.shape[1] % 64 == 0:
            kept.append(matrix.contiguous())
        if sum(weight.numel() for weight in kept) >= most:
            break
    return kept


def encoder_weights(most: int) -> list[Tensor]:
    """Of the built-in encoder, if it is in the cache: real weights that were never quantized."""
    if not BUILTIN_ENCODER.path.is_file():
        return []
    try:
        tensors = open_source(BUILTIN_ENCODER_NAME).tensors()
        return _sampled(
            (floats(weight) for name, weight in tensors if len(weight.shape) == 2 and "layer." in name), most
        )
    except QuireError:
        return []


# ---------------------------------------------------------------------- LLM.int8


def measure_llm_int8(
    setup: Setup, source: Source, sequences: Sequence[Sequence[int]], kept: KeptLogits
) -> LlmInt8Result:
    cases = {
        (name, loud): divergence(source, format_named(name), loud, sequences, kept, setup.seed)[0]
        for name, loud in ((VECTOR_WISE, False), ("int8", False), ("llm-int8", False), (VECTOR_WISE, True),
                           ("int8", True), ("none", True))
    }  # fmt: skip
    watched = WatchedLlmInt8()
    cases["llm-int8", True], model = divergence(source, watched, True, sequences, kept, setup.seed)
    return LlmInt8Result(
        quiet={name: cases[name, False] for name in INT8},
        loud={name: cases[name, True] for name in INT8},
        exact=cases["none", True],
        shares=watched.shares(model.config.num_layers),
        same_bits=same_bits(model, sequences[0]),
    )


def divergence(
    source: Source,
    number_format: NumberFormat,
    with_outliers: bool,
    sequences: Sequence[Sequence[int]],
    kept: KeptLogits,
    seed: int = 0,
) -> tuple[float, DecoderModel]:
    """The mean KL divergence from the logits that are kept, and the model."""
    model = loaded(source, LayerFactory(number_format, "cpu"), seed, with_outliers)
    logits = each_logits(model, sequences, kv_dtype_of(number_format))
    return total(quality_of(kept, logits, sequences)).mean_kl, model


def same_bits(model: DecoderModel, token_ids: Sequence[int]) -> bool:
    """Whether some rows of a batch of 80 short sequences are what they are alone."""
    short = [list(token_ids[i % 7 : i % 7 + 3 + i % 5]) for i in range(BATCH)]
    together = logits_of(model, short, "float32")[:: BATCH // 8]
    alone = (logits_of(model, [ids], "float32")[0] for ids in short[:: BATCH // 8])
    return all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


# ---------------------------------------------------------------------- what may be said


def order_check(name: str, by_scheme: Mapping[str, Rounded]) -> Check:
    order = ("nf4-b64", "fp4-b64", SYMMETRIC)
    errors = [by_scheme[scheme].error for scheme in order]
    measured = " and ".join(f"{scheme} {error:.4f}" for scheme, error in zip(order, errors, strict=True))
    held = all(a < b for a, b in pairwise(errors))
    return Check(f"NF4 < FP4 < symmetric INT4 in error at blocks of 64, {name}", measured, held)


def _asymmetric(name: str, by_scheme: Mapping[str, Rounded]) -> Check:
    nf4, int4 = by_scheme["nf4-b64n"], by_scheme["int4-g64z"]
    measured = f"{int4.error:.4f} in {int4.bits:.3f} bits against {nf4.error:.4f} in {nf4.bits:.3f}"
    return Check(
        f"INT4 with zero points is as near as NF4 (within 5 %), for more bits, {name}",
        measured,
        int4.error < 1.05 * nf4.error and int4.bits > nf4.bits,
    )


def _double(by_scheme: Mapping[str, Rounded]) -> Check:
    plain, double = by_scheme["nf4-b64"].bits, by_scheme["nf4-b64n"].bits
    return Check(
        f"double quantization saves {SAVED_BITS} bits per weight, by the stored bytes",
        f"{plain:.3f} − {double:.3f} = {plain - double:.3f}",
        abs(plain - double - SAVED_BITS) < 0.001,
    )


def outlier_checks(result: LlmInt8Result) -> list[Check]:
    plain, ours, mixed = (result.loud[name] for name in (VECTOR_WISE, "llm-int8", "int8"))
    calm = result.quiet["int8"]
    return [
        Check(
            f"with outliers plain int8 diverges {TIMES:.0f} × as far as LLM.int8 or more",
            f"{plain:.4f} against {ours:.4f}: {plain / ours:.0f} ×",
            plain >= TIMES * ours,
        ),
        Check(
            f"with outliers LLM.int8 diverges at most {WITHIN} × as far as int8 without them",
            f"{ours:.4f} against {calm:.4f}: {ours / calm:.2f} ×",
            ours <= WITHIN * calm,
        ),
        Check(
            "int8's Hadamard matrix spreads outliers: it diverges less than vector-wise int8",
            f"{mixed:.4f} against {plain:.4f} with outliers, {calm:.4f} against "
            f"{result.quiet[VECTOR_WISE]:.4f} without",
            mixed < plain,
        ),
        Check(
            f"LLM.int8 gives rows the same bits alone and in a batch of {BATCH}",
            "equal" if result.same_bits else "not equal",
            result.same_bits,
        ),
    ]
