"""`numbers`: the rules of thumb that every developer with LLMs should know, measured on this machine."""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.bench.drive import Bench
from quire.bench.table import in_bytes
from quire.engine.build import block_layout
from quire.models.weight_shape import weight_shape
from quire_lab.measure.compare import Interleaved, interleave
from quire_lab.measure.engines import in_words, opened, prompt_rate, step_seconds, warm_up
from quire_lab.measure.speculate import PASSAGES, QUESTIONS
from quire_lab.report.experiment import Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, line_style, look, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, Interval, Ratio

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 64
USUAL_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Text:
    """How the tokenizer cuts English prose."""

    num_words: int
    num_characters: int
    num_tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class Speed:
    num_sequences: int
    rate: Interval  # tokens a second

    @property
    def tokens_per_second(self) -> float:
        return self.rate.median

    def cost_per_million(self, price_per_hour: float) -> float:
        return price_per_hour / 3600 / self.tokens_per_second * 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_dtype: str
    format_name: str


def run(setup: Setup) -> Finding:
    with opened(setup, enable_prefix_caching=False, steps_in_flight=0) as bench:
        warm_up(bench)
        report = bench.built.report
        text = _text(setup, bench)
        memory = _memory(bench)
        fit = min(setup.pick(4, 64, 128), report.limits.max_num_seqs, report.pool.num_tokens // (2 * CONTEXT))
        batches = [n for n in BATCHES if n <= fit]
        prompt = prompt_rate(bench, setup.pick(64, 512, 2048))
        variants = {n: partial(_decode_rate, bench, n, setup.pick(4, 8, 24)) for n in batches}
        measured = interleave(setup, variants, float, "sequences in the batch")
        words = in_words(bench)
    return _finding(setup, text, memory, prompt, measured, words)


def _decode_rate(bench: Bench, num_sequences: int, num_steps: int) -> float:
    """Tokens a second of all sequences, by the median step."""
    return num_sequences / statistics.median(step_seconds(bench, num_sequences, CONTEXT, num_steps))


def _text(setup: Setup, bench: Bench) -> Text | None:
    """None for a model without a tokenizer."""
    if bench.tokenizer is None:
        return None
    texts, source = [*PASSAGES, *QUESTIONS], "passages and questions of the benchmarks"
    if contexts := setup.data.contexts():
        texts = contexts
        source = f"{len(texts)} paragraphs of encyclopedia text (XQuAD, English)"
    return Text(
        sum(len(text.split()) for text in texts),
        sum(map(len, texts)),
        sum(len(bench.tokenizer.encode(text)) for text in texts),
        source,
    )


def _memory(bench: Bench) -> Memory:
    built = bench.built
    numbers = built.report.precision
    return Memory(
        weight_shape(built.model, numbers.format).num_parameters,
        built.report.start.weights_bytes,
        block_layout(built.report.pool.block_size, built.model, numbers).bytes_per_token,
        numbers.kv_dtype,
        numbers.format_name,
    )


def _finding(
    setup: Setup,
    text: Text | None,
    memory: Memory,
    prompt: float,
    measured: Interleaved[int, float],
    words: str,
) -> Finding:
    speeds = [Speed(n, measured.interval(n, float)) for n in measured.runs]
    single, largest = speeds[0], speeds[-1]
    gain = measured.ratio(largest.num_sequences, single.num_sequences, float)
    price, currency = setup.price_per_hour, setup.currency
    per_word = "" if text is None else f"{text.num_tokens / text.num_words:.2f} tokens per word; "
    take_away = (
        f"{per_word}{memory.weights_bytes / memory.num_parameters:.2f} bytes per parameter; "
        f"{in_bytes(memory.kv_bytes_per_token)} of KV per token. A batch of {largest.num_sequences} against one "
        f"sequence: {gain.claim('times the tokens a second')}; a million tokens cost {currency}"
        f"{single.cost_per_million(price):.2f} alone and {currency}{largest.cost_per_million(price):.2f} in the batch."
    )
    rows = _rows(setup, text, memory, prompt, single, largest, gain)
    picture = Picture(
        "numbers",
        "What tokens cost here",
        f"At {currency}{price:g} an hour. A batch of {largest.num_sequences} against one sequence: "
        f"{gain.short('times the tokens a second')}.",
        lambda figure: _draw(figure, setup, memory, speeds),
    )
    results = {
        "tokens_per_word": None if text is None else text.num_tokens / text.num_words,
        "characters_per_token": None if text is None else text.num_characters / text.num_tokens,
        "num_parameters": memory.num_parameters,
        "weights_bytes": memory.weights_bytes,
        "bytes_per_parameter": memory.weights_bytes / memory.num_parameters,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "prompt_tokens_per_second": prompt,
        "decode_tokens_per_second": {speed.num_sequences: speed.tokens_per_second for speed in speeds},
        "decode_intervals": {speed.num_sequences: speed.rate.record() for speed in speeds},
        "gain_from_batching": gain.record(),
        "price_per_hour": price,
        "cost_per_million_tokens_alone": single.cost_per_million(price),
        "cost_per_million_tokens_batched": largest.cost_per_million(price),
        "cost_per_million_prompt_tokens": price / 3600 / prompt * 1e6,
    }
    return Finding(
        take_away,
        [Table("Measured here", ["what", "here", "rule of thumb"], rows, left=3)],
        [picture],
        results,
        {"seed": setup.seed, "context": CONTEXT, "price_per_hour": price, "model": words},
        (),
        (
            words,
            *(() if text is None else (f"text: {text.source}",)),
            f"decoding: steps with {CONTEXT} tokens of context and more; all batches in turns, "
            f"{measured.num_rounds} rounds, the median step of each; medians with {CONFIDENCE_WORDS} intervals",
            f"costs: {currency}{price:g} an hour for this machine, always busy (--price-per-hour changes it)",
            "rules of thumb: as usually quoted for English text, 16-bit weights and large models on GPUs; a small "
            "model on a CPU differs, and that is the point of measuring",
        ),
    )


def _rows(
    setup: Setup,
    text: Text | None,
    memory: Memory,
    prompt: float,
    single: Speed,
    largest: Speed,
    gain: Ratio,
) -> list[list[str]]:
    price, currency = setup.price_per_hour, setup.currency
    kv = memory.kv_bytes_per_token
    cost_in = price / 3600 / prompt * 1e6
    rows = []
    if text is not None:
        rows += [
            ["tokens per English word", f"{text.num_tokens / text.num_words:.2f}", "1.3"],
            ["characters per token", f"{text.num_characters / text.num_tokens:.1f}", "4"],
        ]
    return [
        *rows,
        ["parameters", f"{memory.num_parameters / 1e6:,.1f} million", "–"],
        [
            f"memory per parameter ({memory.format_name})",
            f"{memory.weights_bytes / memory.num_parameters:.2f} bytes",
            "2 bytes in 16 bits, 1 in 8",
        ],
        [f"KV per token ({memory.kv_dtype})", in_bytes(kv), "about 1 MB for 13 billion parameters"],
        [f"KV of one sequence of {USUAL_CONTEXT:,} tokens", in_bytes(kv * USUAL_CONTEXT), "–"],
        ["tokens whose KV weighs as much as the weights", f"{memory.weights_bytes / kv:,.0f}", "–"],
        ["operations per token", f"{2 * memory.num_parameters / 1e6:,.0f} million", "2 per parameter"],
        ["prompt tokens per second", f"{prompt:,.0f}", "–"],
        ["output tokens per second, one sequence", single.rate.text(0), "–"],
        [f"output tokens per second, batch of {largest.num_sequences}", largest.rate.text(0), "–"],
        ["gain from batching", gain.text(), "10 × and more"],
        [
            "an output token alone over a prompt token, time",
            f"{prompt / single.tokens_per_second:.1f} ×",
            "–",
        ],
        ["a million output tokens, one sequence", f"{currency}{single.cost_per_million(price):.3f}", "–"],
        [
            f"a million output tokens, batch of {largest.num_sequences}",
            f"{currency}{largest.cost_per_million(price):.3f}",
            "–",
        ],
        ["a million prompt tokens", f"{currency}{cost_in:.3f}", "a third to a fifth of output tokens"],
    ]


def _draw(figure: Any, setup: Setup, memory: Memory, speeds: list[Speed]) -> None:
    left, right = figure.subplots(1, 2)
    counts = [speed.num_sequences for speed in speeds]
    costs = [speed.cost_per_million(setup.price_per_hour) for speed in speeds]
    # cost is the inverse of the rate: the ends of the interval change places
    ends = [speed.rate.ends_or_median() for speed in speeds]
    scale = [cost * speed.tokens_per_second for cost, speed in zip(costs, speeds, strict=True)]
    down = [cost - x / high for cost, x, (_, high) in zip(costs, scale, ends, strict=True)]
    up = [x / low - cost for cost, x, (low, _) in zip(costs, scale, ends, strict=True)]
    left.errorbar(counts, costs, yerr=[down, up], capsize=2, **line_style(0))
    plain_log(left, "x")
    plain_log(left, "y")
    left.set_xticks(counts, [str(n) for n in counts])
    for speed, cost in zip(speeds, costs, strict=True):
        left.annotate(
            f"{speed.tokens_per_second:,.0f}", (speed.num_sequences, cost), textcoords="offset points", xytext=(4, 5),
            fontsize=7,
        )  # fmt: skip
    left.set(
        title="cost of output tokens (labels: tokens per second)",
        xlabel="sequences in the batch",
        ylabel=f"{setup.currency} per million tokens",
    )
    contexts = [128, 512, 2048, 8192]
    for series, count in enumerate((1, 8, 64)):
        sizes = [count * context * memory.kv_bytes_per_token / 1e6 for context in contexts]
        right.plot(
            contexts, sizes, label=f"KV of {count} sequence{'s' if count > 1 else ''}", **line_style(series)
        )
    # the one line that does not grow
    right.axhline(memory.weights_bytes / 1e6, color=look(6).color, linewidth=1.2, label="weights")
    plain_log(right, "x")
    plain_log(right, "y")
    right.set_xticks(contexts, [f"{context:,}" for context in contexts])
    right.set(title="memory", xlabel="tokens of each sequence", ylabel="MB")
    right.legend(loc="upper left")


EXPERIMENT = Experiment(
    "numbers",
    "Numbers every LLM developer should know",
    "Tokens per word, bytes per parameter and per token, what batching gains and what a million tokens cost.",
    run,
)
