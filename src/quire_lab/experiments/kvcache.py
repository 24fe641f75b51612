"""`kvcache`: the same tokens with a KV cache and without one, where every token computes all before it again."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from quire.bench.drive import Bench
from quire.bench.workload import Lengths
from quire.core.request import Request
from quire_lab.measure.engines import greedy, in_words, opened, prompt_rate, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, Picture, line_style, plain_log
from quire_lab.report.regression import Power, fit_power

PROMPT = 2  # tokens: short, so that length is what was generated
REPEATS = 2  # a token's time is the least of its repeats: others were disturbed


@dataclass(frozen=True, slots=True)
class Generated:
    token_ids: list[int]
    seconds: list[float]  # each token's
    computed: list[int]  # tokens that the model had computed when each was there

    @property
    def until(self) -> list[float]:
        """Seconds until each token was there."""
        return list(accumulate(self.seconds))


def run(setup: Setup) -> Finding:
    with opened(setup, enable_prefix_caching=False, steps_in_flight=0) as bench:
        warm_up(bench)
        length = _length(setup, bench)
        prompt = bench.requests([Lengths(PROMPT, 1)])[0].prompt_token_ids
        with setup.progress(length * REPEATS * 2, "tokens") as bar:
            bar.note("with a cache")
            cached = [_with_cache(bench, prompt, length, bar) for _ in range(REPEATS)]
            bar.note("without a cache")
            bare = [_without_cache(bench, prompt, length, bar) for _ in range(REPEATS)]
        words = in_words(bench)
    return _finding(setup, _least(cached), _least(bare), length, words)


def _least(repeats: list[Generated]) -> Generated:
    seconds = [min(times) for times in zip(*(one.seconds for one in repeats), strict=True)]
    return Generated(repeats[0].token_ids, seconds, repeats[0].computed)


def _length(setup: Setup, bench: Bench) -> int:
    """Tokens for which computing all prefixes, half the length's square, takes the size's share of time."""
    report = bench.built.report
    longest = min(report.limits.max_model_len, report.pool.num_tokens) - PROMPT - 1
    half_square = setup.pick(2.0, 30.0, 200.0) * prompt_rate(bench) / REPEATS
    fits = int((2 * half_square) ** 0.5) // 32 * 32
    return min(max(32, fits), longest, setup.pick(48, 1024, 4096))


def _with_cache(bench: Bench, prompt: list[int], length: int, bar: Callable[[], None]) -> Generated:
    engine, generated = bench.engine, Generated([], [], [])
    engine.add(Request(f"cached-{time.monotonic_ns()}", prompt, greedy(length)))
    last, before = time.perf_counter(), engine.stats.num_computed_tokens
    while engine.has_work:
        for update in engine.step():
            now = time.perf_counter()
            generated.token_ids.extend(update.token_ids)
            generated.seconds.append(now - last)
            generated.computed.append(engine.stats.num_computed_tokens - before)
            last = now
            bar()
    return generated


def _without_cache(bench: Bench, prompt: list[int], length: int, bar: Callable[[], None]) -> Generated:
    """Each token is a request of its own, whose prompt is all that there is so far."""
    engine, generated = bench.engine, Generated([], [], [])
    before = engine.stats.num_computed_tokens
    for index in range(length):
        started = time.perf_counter()
        engine.add(Request(f"bare-{index}-{time.monotonic_ns()}", prompt + generated.token_ids, greedy(1)))
        while engine.has_work:
            for update in engine.step():
                generated.token_ids.extend(update.token_ids)
        generated.seconds.append(time.perf_counter() - started)
        generated.computed.append(engine.stats.num_computed_tokens - before)
        bar()
    return generated


def _finding(setup: Setup, on: Generated, off: Generated, length: int, words: str) -> Finding:
    first = length // 4  # the curve's beginning is the prompt's and the first steps' doing
    lengths = list(range(1, length + 1))
    fits = {
        name: fit_power(lengths[first:], generated.until[first:])
        for name, generated in (("on", on), ("off", off))
    }
    work = {
        name: fit_power(lengths[first:], generated.computed[first:])
        for name, generated in (("on", on), ("off", off))
    }
    same = on.token_ids == off.token_ids
    times = off.until[-1] / on.until[-1]
    take_away = (
        f"{length} tokens take {on.until[-1]:.2f} s with a KV cache and {off.until[-1]:.1f} s without, "
        f"{times:.0f} times as long: time grows as length to the {fits['on'].exponent:.2f} against "
        f"{fits['off'].exponent:.2f}, work to the {work['on'].exponent:.2f} against {work['off'].exponent:.2f}."
    )
    picture = Picture(
        "kvcache",
        "Generating with and without a KV cache",
        f"Without it {length} tokens take {times:.0f} times as long, and the gap grows with the length.",
        lambda figure: _draw(figure, on, off, fits, work),
        height=3.9,
    )
    return Finding(
        take_away,
        [_table(on, off, length)],
        [picture],
        {
            "length": length,
            "same_tokens": same,
            "work_fits": {name: asdict(fit) for name, fit in work.items()},
            "tokens_computed_with_cache": on.computed[-1],
            "tokens_computed_without_cache": off.computed[-1],
            "fits": {name: asdict(fit) for name, fit in fits.items()},
            "seconds_with_cache": on.seconds,
            "seconds_without_cache": off.seconds,
        },
        {"seed": setup.seed, "prompt_tokens": PROMPT, "num_tokens": length, "model": words},
        [
            Check("both ways give the same tokens", "the same" if same else "different", same),
            Check(
                "without a cache time grows by a higher power of the length",
                f"{fits['off'].exponent:.2f} against {fits['on'].exponent:.2f}",
                fits["off"].exponent > fits["on"].exponent + 0.2,
            ),
            Check(
                "tokens computed grow as the square of the length without a cache, and as the length with one",
                f"{work['off'].exponent:.2f} and {work['on'].exponent:.2f}",
                work["off"].exponent > 1.7 and work["on"].exponent < 1.05,
            ),
        ],
        (
            f"{words}; one sequence, greedy, {PROMPT} prompt tokens; each token's time is the least of {REPEATS} runs",
            "without: every token is a fresh request whose prompt is all that was generated so far",
            "exponents: least squares in the logarithms over the last three quarters of the length (R² "
            f"{fits['on'].r_squared:.3f} and {fits['off'].r_squared:.3f}); with long prefixes the power without a "
            "cache goes towards 2 and, once attention counts, beyond",
        ),
    )


def _table(on: Generated, off: Generated, length: int) -> Table:
    shown = sorted({n for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if n < length} | {length})
    rows = [
        [
            f"{n:,}",
            f"{on.until[n - 1]:.3f}",
            f"{off.until[n - 1]:.3f}",
            f"{off.until[n - 1] / on.until[n - 1]:.1f}",
            f"{on.computed[n - 1]:,}",
            f"{off.computed[n - 1]:,}",
            f"{1e3 * _near(on.seconds, n):.1f}",
            f"{1e3 * _near(off.seconds, n):.1f}",
        ]
        for n in shown
    ]
    head = [
        "tokens",
        "cache on, s",
        "off, s",
        "ratio",
        "computed, on",
        "computed, off",
        "each, on, ms",
        "each, off, ms",
    ]
    return Table(
        "Time until a number of tokens was generated, and how many were computed for them", head, rows, left=0
    )


def _near(seconds: list[float], place: int) -> float:
    """The median around the place: one step may be disturbed."""
    return statistics.median(seconds[max(0, place - 4) : place + 3])


def _draw(figure: Any, on: Generated, off: Generated, fits: dict[str, Power], work: dict[str, Power]) -> None:
    left, middle, right = figure.subplots(1, 3)
    lengths = list(range(1, len(on.seconds) + 1))
    marks = {"markevery": max(1, len(lengths) // 8)}
    for series, (generated, key, words) in enumerate(((on, "on", "cache on"), (off, "off", "cache off"))):
        style = {**line_style(series), **marks}
        left.plot(lengths, generated.until, label=f"{words}: power {fits[key].exponent:.2f}", **style)
        fitted = lengths[len(lengths) // 4 :]
        left.plot(fitted, [fits[key].at(n) for n in fitted], color=GREY, linewidth=0.9, linestyle=":")
        middle.plot(lengths, [1e3 * _near(generated.seconds, n) for n in lengths], label=words, **style)
        right.plot(lengths, generated.computed, label=f"{words}: power {work[key].exponent:.2f}", **style)
    left.plot([], [], color=GREY, linewidth=0.9, linestyle=":", label="fitted power")
    left.set(title="time for a number of tokens", xlabel="tokens generated", ylabel="seconds")
    middle.set(title="time of each token", xlabel="tokens generated before it", ylabel="milliseconds")
    right.set(title="work", xlabel="tokens generated", ylabel="tokens computed")
    middle.set_ylim(bottom=0)
    for axis in (left, right):
        plain_log(axis, "x")
        plain_log(axis, "y")
    for axis in (left, middle, right):
        axis.legend(loc="upper left", fontsize=7)


EXPERIMENT = Experiment(
    "kvcache",
    "What a KV cache is for",
    "Attention looks back at the keys and values of all tokens so far. What if they were not kept?",
    run,
)
